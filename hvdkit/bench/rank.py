"""A rank of a benchmark: `python -m hvdkit.bench.rank SPEC`, started by `jobs.Job`.

With `--before`, the command is `python …/rank.py SPEC`.
"""

import importlib.util
import json
import sys
from pathlib import Path


def _use_this_package() -> None:
    """Import `hvdkit.bench` and `hvdkit.system` from beside this file.

    With `--before`, `import hvdkit` finds the other hvdkit, which is measured. The code of the
    benchmark, and that of its connections, still come from this hvdkit.
    """
    here = Path(__file__).parent
    sys.path.remove(str(here))  # because this file was started as a script
    for name in ("bench", "system"):
        folder = here.parent / name
        spec = importlib.util.spec_from_file_location(
            f"hvdkit.{name}", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[f"hvdkit.{name}"] = importlib.util.module_from_spec(spec)


def main() -> None:
    """Run this rank. The module `spec["module"]` builds its `Workload`."""
    from hvdkit.bench import guard, worker

    spec = json.loads(sys.argv[1])
    rank = worker.rank_of_this_process()
    guard.fork(spec, rank)
    module = importlib.import_module(spec["module"])
    worker.serve(spec, rank, lambda: module.build(spec | {"rank": rank}))


if __name__ == "__main__":
    if not __package__:
        _use_this_package()
    main()
