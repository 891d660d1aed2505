"""Name the rank that calls `hvd.shutdown()` while other ranks still call collectives.

A shutdown on one rank shuts the engine down on all ranks. Their collectives then fail with an error
that does not name the rank. So the rank writes a note to the folder of HVDKIT_RECORD_DIR first.
`hvdkit run` copies notes to the folders of the other hosts, and reports them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdkit.runtime import record_files
from hvdkit.runtime.recorder import FOLDER_VARIABLE
from hvdkit.system.plain_files import read_json
from hvdkit.system.whole_files import replacing

_NOTES = record_files.NOTE.format("*")
# A file of each rank that writes records to the folder.
_RANKS = record_files.STACKS.format("*")
_SHUT_DOWN = "Horovod has been shut down."
#: Seconds to wait for a note from another host.
_SECONDS = 2.5
_POLL_SECONDS = 0.05
_PACKAGE = Path(__file__).parents[1]


class Departure:
    """The notes of shutdowns, on one rank.

    Args:
        environ: the environment.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._size = 1
        self._written: list[Path] = []

    def begin(self, size: int) -> None:
        """Set the number of ranks, after `init`."""
        self._size = size

    def write(self, rank: int) -> None:
        """Write this rank's note, before it shuts the engine down.

        No note is written while an exception is handled, or if there is a note of another rank:
        then the exception or the other rank is the cause of the failure, not this shutdown.
        """
        folder = self._folder()
        if folder is None or self._size == 1 or sys.exc_info()[0] is not None or _notes(folder):
            return
        text = f"Rank {rank} on {socket.gethostname()} called hvd.shutdown(){_caller()}."
        note = folder / record_files.NOTE.format(rank)
        with contextlib.suppress(OSError):  # such as a full disk
            with replacing(note) as draft:
                draft.write_text(json.dumps({"rank": rank, "text": text}))
            self._written.append(note)

    def remove(self) -> None:
        """Remove this rank's note, before it starts the engine again."""
        while self._written:
            with contextlib.suppress(OSError):
                self._written.pop().unlink()

    def explain(self, seconds: float = _SECONDS) -> str:
        """Return which rank has called `hvd.shutdown()`; "" if no rank has.

        If ranks of the job write to other folders, wait for a copy of a note.

        Args:
            seconds: the longest time to wait.
        """
        folder = self._folder()
        if folder is None:
            return ""
        deadline = time.monotonic() + seconds
        while not (texts := _notes(folder)):
            all_here = len(list(folder.glob(_RANKS))) >= self._size
            if all_here or time.monotonic() > deadline:
                return ""
            time.sleep(_POLL_SECONDS)
        return " ".join(texts)

    def explained_text(self, text: str) -> str:
        """Return the text of an error; with the rank that has shut down if this is the cause."""
        before, found, after = text.partition(_SHUT_DOWN)
        if not found or not (cause := self.explain()) or cause in text:
            return text
        # Not at the end: TensorFlow cuts the text of an error after the name of the graph's node.
        return f"{before}{found} {cause}{after}"

    def explained(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function like `function`, whose error names a rank that has shut down.

        Args:
            function: a function of the engine for PyTorch, which raises RuntimeError.
        """

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except RuntimeError as error:
                text = self.explained_text(str(error))
                if text == str(error):
                    raise
                raise RuntimeError(text) from None

        return call

    def _folder(self) -> Path | None:
        folder = self._environ.get(FOLDER_VARIABLE)
        return Path(folder) if folder and os.path.isdir(folder) else None


def _caller() -> str:
    """Return the place in the user's code from which hvdkit was called."""
    for frame in reversed(traceback.extract_stack()):
        if not Path(frame.filename).is_relative_to(_PACKAGE):
            source = f": {frame.line}" if frame.line else ""
            return f" at {frame.filename}:{frame.lineno} in {frame.name}{source}"
    return ""


def _notes(folder: Path) -> list[str]:
    texts = []
    for path in sorted(folder.glob(_NOTES)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            texts.append(str(read_json(path)["text"]))
    return texts
