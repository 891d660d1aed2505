"""Read the stacks that `faulthandler` writes."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdkit.system.plain_files import read_text

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'\s+File "(.*)", line (\d{1,9}) in (.*)')
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U00(?:0[0-9a-f]|10)[0-9a-f]{4}")
_LIBRARIES = (
    sysconfig.get_paths()["stdlib"],
    "site-packages",
    "dist-packages",
    "<frozen",
    "/lib/python3",
)
# The folder of this package.
_PACKAGE = Path(__file__).parents[1]
# Folders of installed packages.
_INSTALLED = ("site-packages/", "dist-packages/")
# The folder of an installed package, at the beginning of the path of a file in it.
_PACKAGE_FOLDER = re.compile(r"(.*/(?:site|dist)-packages/[^/]+)/")
# The file of TensorFlow's generated functions, and of `python -c`.
_GENERATED = "<string>"
# The names of the files that AutoGraph makes of the functions that TensorFlow traces. They are
# temporary, so a user cannot read the line.
_AUTOGRAPH = "__autograph_generated_file"
# The function of TensorFlow in which a thread waits until a graph has run: the end of the file's
# path, and its name.
_RUNS_GRAPH = ("tensorflow/python/eager/execute.py", "quick_execute")
# The outermost function of a main thread that has run the script: the end of the file's path, and
# its name.
_WAITS_FOR_THREADS = ("/threading.py", "_shutdown")
# The functions in which the main thread waits for a backward pass of PyTorch: the end of a file's
# path, and the functions. On a GPU, another thread computes the pass and calls its hooks.
_BACKWARD = {
    "torch/autograd/graph.py": {"_engine_run_backward"},
    "torch/autograd/__init__.py": {"backward", "grad"},
}
# Installed packages in whose functions a main thread is at the end of the process, or that run only
# the training of others.
_NEVER_TRAIN = {"horovod", "hvdkit", "torch", "tensorflow", "keras"}
# The script of an installed program, such as /venv/bin/train.
_PROGRAM = re.compile(r".*/bin/[^/.]+")
# The outermost function of a thread that Python has started.
_BOOTSTRAP = "_bootstrap"
# faulthandler does not write the frames outside of this number.
_MOST_FRAMES = 100
# The longest source file that is read, in bytes, the longest path of a file, and the most
# characters of a line that are shown.
_LONGEST_SOURCE, _LONGEST_PATH, _SHOWN = 500_000, 4095, 200
# The packages whose hooks a backward pass calls, beside those of the user.
_OF_PASS = ("/torch/", "/horovod/", "/hvdkit/")
#: Functions that wait for a collective: the end of a file's path, and the functions.
_WAITS = {
    "horovod/torch/mpi_ops.py": None,
    "horovod/tensorflow/mpi_ops.py": None,
    "hvdkit/torch/collectives.py": None,
    "hvdkit/tensorflow/collectives.py": None,
    "hvdkit/training/stragglers.py": {"measured"},
    "hvdkit/reduction/synchronizer.py": {"wait", "_finish", "_advance_bucket", "send", "make_plan"},
}


@dataclass(frozen=True)
class Frame:
    """One frame of a stack.

    Attributes:
        file: the path of the source file.
        line: the line, from 1.
        trains: whether the file is part of the installed package that is the user's training
            program (`python -m PACKAGE.train`).
    """

    file: str
    line: int
    function: str
    trains: bool = field(default=False, compare=False)

    @property
    def is_library(self) -> bool:
        """Whether the file belongs to Python, hvdkit or an installed package, or is generated."""
        if self.trains:
            return False
        if self.file == _GENERATED:
            return self.function.startswith("horovod_")
        if _AUTOGRAPH in self.file:
            return True
        # On another host, the package may be in another folder. A user may also have a folder named
        # hvdkit, so the module must exist in the package.
        _, inside, module = self.file.rpartition("/hvdkit/")
        if inside and (_PACKAGE / module).is_file():
            return True
        return any(part in self.file for part in _LIBRARIES)

    @property
    def waits(self) -> bool:
        """Whether the function waits for a collective."""
        if self.file == _GENERATED and self.function.startswith("horovod_"):
            return True
        return _is_in(self, _WAITS)

    def __str__(self) -> str:
        # The text may be the end of a sentence.
        lines = _lines(self.file)
        source = lines[self.line - 1] if 0 < self.line <= len(lines) else ""
        source = source[:_SHOWN].strip().removesuffix(",")
        return f"{self.file}:{self.line} in {self.function}" + (f": {source}" if source else "")


@functools.lru_cache(maxsize=64)
def _lines(file: str) -> Sequence[str]:
    """Return the lines of a Python file; empty if it cannot be read.

    Another user may have written the path, so no other file is read: it may be a pipe or a device,
    or have a secret of this user.
    """
    if len(file) > _LONGEST_PATH:
        return []  # `realpath` would take quadratic time
    try:
        # A user's folder may have links. `read_text` does not follow one that is made meanwhile.
        path = Path(os.path.realpath(file))
        return read_text(path, _LONGEST_SOURCE).split("\n") if path.suffix == ".py" else []
    except (OSError, ValueError):  # ValueError: no file can have this name
        return []


def _is_in(frame: Frame, functions: Mapping[str, Collection[str] | None]) -> bool:
    """Return whether a frame is in one of the functions of a file; None: in any of them."""
    return any(
        frame.file.endswith(end) and (names is None or frame.function in names)
        for end, names in functions.items()
    )


def main_thread(text: str) -> Sequence[Frame]:
    """Return the frames of the main thread, innermost first; empty if they are not known.

    If the main thread waits for a backward pass that another thread computes, the frames of that
    thread come first, because the main thread has called them.
    """
    # The kernel prefers the main thread for a signal to the process, so it is the current thread.
    return next((frames for current, frames in _threads(text) if current), [])


def waiting_thread(text: str) -> Sequence[Frame]:
    """Return the frames of the thread that waits for a collective: if it can be, the main thread.

    Without such a thread, return those of the main thread.
    """
    main = main_thread(text)
    others = (frames for current, frames in _threads(text) if not current and waits(frames))
    return main if waits(main) else next(others, main)


def other_thread(text: str) -> Frame | None:
    """Return the innermost frame of the user's code in a thread other than the main thread."""
    others = (frames for current, frames in _threads(text) if not current)
    return next((f for frames in others for f in frames if not f.is_library), None)


def lacks_threads(text: str) -> bool:
    """Return whether the rank has more threads than the 100 that faulthandler writes."""
    return "..." in text.splitlines()


def _threads(text: str) -> list[tuple[bool, list[Frame]]]:
    """Return whether a thread is the current one, and its frames, for each thread.

    If the text has several dumps, only the threads of the last complete dump are returned, and
    those of a dump after it that was cut off.
    """
    found: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            found.append((thread[1] == "Current thread", []))
        elif found and len(found[-1][1]) < _MOST_FRAMES and (frame := _FRAME.fullmatch(line)):
            names = (_unescaped(frame[1]), int(frame[2]), _unescaped(frame[3]))
            found[-1][1].append(Frame(*names))
    # faulthandler writes the current thread last.
    ends = [i for i, (current, _) in enumerate(found) if current]
    begin = ends[-2] + 1 if len(ends) > 1 else 0
    return _with_training_package(_with_backward(found[begin:]))


def _unescaped(name: str) -> str:
    """Return a name from faulthandler, which writes other characters than ASCII as `\\xfc`."""
    return _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), name)


def _with_training_package(
    threads: list[tuple[bool, list[Frame]]],
) -> list[tuple[bool, list[Frame]]]:
    """Mark the frames of the installed package that is the user's training program.

    The main thread then has no frame outside of libraries, but that of the program's script.
    """
    main = next((frames for current, frames in threads if current), [])
    own = [frame for frame in main if not frame.is_library and not _PROGRAM.fullmatch(frame.file)]
    packages = (found[1] for f in reversed(main) if (found := _PACKAGE_FOLDER.match(f.file)))
    folder = next(packages, None)
    if own or folder is None or Path(folder).name in _NEVER_TRAIN:
        return threads
    return [
        (current, [replace(f, trains=f.file.startswith(f"{folder}/")) for f in frames])
        for current, frames in threads
    ]


def _with_backward(threads: list[tuple[bool, list[Frame]]]) -> list[tuple[bool, list[Frame]]]:
    """Add the frames of a thread that computes a backward pass to those of the main thread."""
    main = next((frames for current, frames in threads if current), [])
    if not main or not _is_in(main[0], _BACKWARD):
        return threads
    passes = [frames for current, frames in threads if not current and _is_pass(frames)]
    # Each GPU has a thread. The one that waits for a collective holds up the pass.
    found = list(filter(waits, passes)) or passes
    if len(found) != 1:
        return threads
    others = [each for each in threads if not each[0] and each[1] is not found[0]]
    return [*others, (True, [*found[0], *main])]


def _is_pass(frames: Sequence[Frame]) -> bool:
    """Return whether a thread computes a backward pass: PyTorch has started it, and not Python."""
    if not frames or len(frames) >= _MOST_FRAMES:
        return False
    outermost = frames[-1]
    return outermost.function != _BOOTSTRAP and (
        not outermost.is_library or any(name in outermost.file for name in _OF_PASS)
    )


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code; without one, the innermost frame."""
    own = (frame for frame in frames if not frame.is_library)
    return next(own, frames[0] if frames else None)


def package_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of an installed package that the user's code has called.

    The user's line alone says little if a package runs the whole training, such as `trainer.fit`.

    Returns:
        The frame; None if the user's code has called no package, or Python's library only.
    """
    found = None
    for frame in frames:
        if not frame.is_library:
            return found
        if found is None and any(part in frame.file for part in _INSTALLED):
            found = frame
    return None


def is_ending(frames: Sequence[Frame]) -> bool:
    """Return whether the script has ended, and Python waits for threads that are not daemons."""
    end, function = _WAITS_FOR_THREADS
    return bool(frames) and frames[-1].file.endswith(end) and frames[-1].function == function


def runs_graph(frames: Sequence[Frame]) -> bool:
    """Return whether the thread waits for a graph of TensorFlow, or for an eager operation."""
    end, function = _RUNS_GRAPH
    return bool(frames) and frames[0].file.endswith(end) and frames[0].function == function


def waits(frames: Sequence[Frame]) -> bool:
    """Return whether the thread waits for a collective."""
    return any(frame.waits for frame in frames[:8])
