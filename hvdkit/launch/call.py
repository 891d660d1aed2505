"""The command of a rank of `hvdkit.run`: `python -m hvdkit.launch.call FOLDER`.

The folder belongs to the caller, and only its user can read it.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.system.owned_folders import opened
from hvdkit.system.whole_files import replacing

#: The file with the prefix of the caller's Python, and the folders of its modules.
PATH = "path"
#: The file with the function and its arguments.
FUNCTION = "function"
# The variables in which the agent of `gloo`, Open MPI and MPICH tell a process its rank.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def result_name(rank: int) -> str:
    """Return the name of the file with the result of a rank."""
    return f"result-{rank}"


def main(folder: Path) -> None:
    """Call the function in a folder, and write its result there.

    Raises:
        HvdkitError: the result cannot be pickled.
    """
    import cloudpickle

    rank = next(int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ)
    prefix, path = pickle.loads((folder / PATH).read_bytes())
    others = [each for each in path if each not in sys.path]
    # The caller's folder precedes the installed packages, but those of another Python do not.
    sys.path[:] = [*others, *sys.path] if prefix == sys.prefix else [*sys.path, *others]
    function, args, kwargs = pickle.loads((folder / FUNCTION).read_bytes())
    result = function(*args, **kwargs)
    try:
        data = cloudpickle.dumps(result)
    except Exception as error:
        raise HvdkitError(
            f"the result of rank {rank}, a {type(result).__name__}, cannot be pickled: {error}"
        ) from error
    with replacing(folder / result_name(rank)) as draft:
        draft.write_bytes(data)


if __name__ == "__main__":
    # Programs that clean /tmp may delete the folder, and then another user can make it.
    with opened(Path(sys.argv[1])) as own_folder:
        main(own_folder)
