"""`hvdkit build` on the command line."""

import argparse

from hvdkit.console.flags import TYPES, add_options

HELP = "build, test and install Horovod for the installed frameworks"
EXAMPLE = (
    "  hvdkit build\n"
    "  hvdkit build --frameworks torch --controllers gloo,mpi --wheel-dir wheels/\n"
    "  hvdkit build --patches minimal --target stock/  # almost stock, for comparisons"
)

_OPTIONS = """
--frameworks NAMES        torch, tensorflow or both, separated by a comma (default: those
                          importable)
--controllers NAMES       gloo, mpi or both (default: gloo, and mpi when mpicxx is found)
--gpu auto|nccl|none      nccl: GPU operations with NCCL; none: no GPU operations; auto (default):
                          nccl if the frameworks are CUDA builds, and nvcc and NCCL are found
--patches all|minimal     the patches to apply; minimal: only those that the build needs
                          (default: all)
--jobs N                  compilers to run at once (default: one per core); never more than
                          RAM / 2 GB
--sdist FILE              Horovod's sdist, to build without a network
--wheel-dir DIR           also copy the wheel into DIR
--target DIR              install into DIR, not into this environment
--no-cache                build even if the cache has this wheel
--dry-run                 print the plan, and change nothing
--list-patches            list the patches to Horovod
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the options of `hvdkit build`."""
    add_options(verb, _OPTIONS, {**TYPES, "NAMES": _names}, gpu="auto", patches="all")


def run(options: argparse.Namespace) -> int:
    """Run `hvdkit build`."""
    from hvdkit.console.tables import Console
    from hvdkit.engine import build, plan, report

    console = Console(soft_wrap=True, highlight=False)
    if options.list_patches:
        report.list_patches(console)
        return 0
    made = plan.make_plan(
        plan.Request(
            frameworks=options.frameworks,
            controllers=options.controllers,
            gpu=options.gpu,
            patches=options.patches,
            jobs=options.jobs,
        )
    )
    report.show_plan(made, console, details=options.dry_run)
    if options.dry_run:
        return 0
    build.build(
        made,
        build.Options(
            sdist=options.sdist,
            wheel_dir=options.wheel_dir,
            target=options.target,
            use_cache=not options.no_cache,
        ),
        console,
    )
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
