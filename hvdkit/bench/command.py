"""`hvdkit bench`: the benchmarks of the command line."""

import argparse
from collections.abc import Callable

HELP = "compare allreduces or training steps with other libraries, or predict larger jobs"
EXAMPLE = """\
  hvdkit bench allreduce -np 2
  hvdkit bench allreduce -np 8 -H host1:4,host2:4 --json cluster.json
  hvdkit bench step -np 2 --models resnet50
  hvdkit bench scale --ranks 8..1024 --step step.json --allreduce cluster.json"""

AddVerb = Callable[[str, str, str], argparse.ArgumentParser]


def add_actions(add_verb: AddVerb) -> None:
    """Add the benchmarks.

    Args:
        add_verb: makes a parser, given its name, help and examples.
    """
    from hvdkit.bench.allreduce import command as allreduce
    from hvdkit.bench.scale import command as scale
    from hvdkit.bench.step import command as step

    for name, module in (("allreduce", allreduce), ("step", step), ("scale", scale)):
        action = add_verb(name, module.HELP, module.EXAMPLE)
        module.add_arguments(action)
        action.set_defaults(run=module.run, when_ended="nothing was measured.")
