"""The files that Horovod's engine opens: its timeline, and the log of its autotuning.

The engine follows links. In a folder of several users, a link of another user could lead to any
file of this user, which the engine would replace. So hvdkit opens the file without following such
links, and the engine gets the path of the descriptor. Only rank 0 has these files.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.system.whole_files import open_to_write

_log = logging.getLogger("hvdkit.runtime")

_TIMELINE, _DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"
_AUTOTUNE, _AUTOTUNE_LOG = "HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG"
# Variables with the rank of a process that a launcher started. The first one that is set counts.
_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


class EngineFiles:
    """Open the files for the engine of this process.

    Args:
        library: the engine's library, whose `horovod_start_timeline` is replaced.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        # The engine opens a timeline some time later, so the descriptors stay open.
        self._opened: list[int] = []
        self._start = library.horovod_start_timeline
        library.horovod_start_timeline = self._start_timeline

    @contextmanager
    def given(self, environ: MutableMapping[str, str]) -> Iterator[None]:
        """Context in which variables name the descriptors of the files. The engine starts in it."""
        while self._opened:  # of an engine that was shut down
            os.close(self._opened.pop())
        before = dict(environ)
        wanted = [_TIMELINE] if environ.get(_TIMELINE) != _DYNAMIC else []
        if environ.get(_AUTOTUNE, "0") not in ("", "0"):
            wanted.append(_AUTOTUNE_LOG)
        names = [name for name in wanted if environ.get(name) and _is_first(environ)]
        for name in names:
            try:
                environ[name] = self._open(environ[name])
            except OSError as error:
                del environ[name]
                _log.warning(
                    "%s is %s, which is not written: %s", name, before[name], error.strerror
                )
        try:
            yield
        finally:
            environ.update({name: before[name] for name in names})

    def _open(self, path: str) -> str:
        self._opened.append(open_to_write(Path(path), os.O_WRONLY))
        return f"/proc/self/fd/{self._opened[-1]}"

    def _start_timeline(self, path: Any, mark_cycles: Any) -> int:
        if self._library.horovod_rank() == 0:
            named = os.fsdecode(path.value)
            try:
                path = ctypes.c_char_p(self._open(named).encode())
            except OSError as error:
                raise HvdkitError(
                    f"the timeline {named} cannot be written: {error.strerror}"
                ) from error
        result: int = self._start(path, mark_cycles)
        return result


def _is_first(environ: MutableMapping[str, str]) -> bool:
    return next((environ[name] for name in _RANKS if name in environ), "0") == "0"
