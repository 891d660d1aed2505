"""Kill a writer before each of its file operations.

    python -m tests.checkpoint.killed FOLDER TEMPLATE STEP

For each file operation of a commit of STEP, FOLDER/NUMBER becomes a copy of TEMPLATE. A process
writes STEP there, and kills itself before this operation. Prints the operations, one per line.
"""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.store import Store
from tests.checkpoint.material import snapshot


def attempt(folder, step, number):
    """Write `step`, and kill this process before the file operation `number`."""
    count = 0

    def before(name, file):
        nonlocal count
        count += 1
        if count == number:
            print(f"{name} {file}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    disk.before_step = before
    with Store(folder, keep_last=2).open_for_writing() as writer:
        writer.write(snapshot(step))


def main(folder, template, step):
    for number in itertools.count(1):
        copy = folder / str(number)
        shutil.copytree(template, copy)
        child = os.fork()
        if child == 0:
            try:
                attempt(copy, step, number)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            # The commit has fewer operations: the process was not killed.
            shutil.rmtree(copy)
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
