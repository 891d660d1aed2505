"""A rank of a benchmark: `python -m hvdkit.bench.rank SPEC`, started by `jobs.Job`.

With `--before`, the command is `python …/rank.py SPEC`.
"""

import importlib.util
import json
import sys
from pathlib import Path


def _use_this_package() -> None:
    """Import `hvdkit.bench` from the folder of this file, and `hvdkit.sealed` from beside it.

    With `--before`, `import hvdkit` finds the other hvdkit, which is measured. The
    code of the benchmark still comes from the folder of this file.
    """
    here = Path(__file__).parent
    sys.path.remove(str(here))  # because this file was started as a script
    location = here / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        "hvdkit.bench", location, submodule_search_locations=[str(here)]
    )
    assert spec is not None
    sys.modules["hvdkit.bench"] = importlib.util.module_from_spec(spec)
    spec = importlib.util.spec_from_file_location("hvdkit.sealed", here.parent / "sealed.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["hvdkit.sealed"] = sealed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sealed)


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
