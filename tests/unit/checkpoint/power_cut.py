"""A simulated disk that loses unsynced changes in a power cut.

The idea is that of ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018).

`Recorder` records the changes of a program to a folder. `Disk` replays them up to any call, and
makes the folder as it may be after a power cut. It has the content of each file at its last fsync,
and the synced changes of each folder. Of the other changes it has none, all or some.
"""

import contextlib
import os
import traceback
from dataclasses import dataclass, field
from pathlib import Path

_CALLS = ("open", "write", "pwrite", "fsync", "mkdir", "rename", "link", "unlink", "rmdir")


@dataclass
class Recorder:
    """Record the calls that change a folder. A context manager.

    Attributes:
        root: the folder.
        calls: (name, arguments). A file or folder is a number that is never used again, because a
            file system may use the inode number of a removed file again.
        number: the number of the root.
        marks: (number of calls so far, the step that was reported as saved).
        skipped: the sync with this number, counted from 1, is not recorded, as if it were missing.
        syncs: the functions of hvdkit that called each sync, and the name of the file or folder.
    """

    root: Path
    skipped: int | None = None
    calls: list = field(default_factory=list)
    marks: list = field(default_factory=list)
    syncs: list = field(default_factory=list)
    number: int = 0
    _numbers: dict = field(default_factory=dict)
    _count: int = 0
    _real: dict = field(default_factory=dict)

    def mark(self, word):
        """Record that the program has reported a saved step to its user now."""
        self.marks.append((len(self.calls), word))

    def __enter__(self):
        self._numbers[self.root.stat().st_ino] = self.number
        for name in _CALLS:
            self._real[name] = getattr(os, name)
            setattr(os, name, getattr(self, f"_{name}"))
        return self

    def __exit__(self, *_):
        for name, function in self._real.items():
            setattr(os, name, function)

    def _new(self, inode):
        """Return a number for a new file or folder."""
        self._count += 1
        self._numbers[inode] = self._count
        return self._count

    def _number(self, descriptor):
        """Return the number of an open file or folder below the root; None outside of it."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        below = path == str(self.root) or path.startswith(f"{self.root}/")
        return self._numbers[os.fstat(descriptor).st_ino] if below else None

    def _parent(self, name, dir_fd):
        """Return the number of the folder of a path, and the last part of the path."""
        if dir_fd is not None and os.sep not in str(name):
            return self._number(dir_fd), str(name)
        path = Path(name)
        descriptor = self._real["open"](path.parent, os.O_RDONLY)
        try:
            return self._number(descriptor), path.name
        finally:
            os.close(descriptor)

    def _note(self, name, *arguments):
        if None not in arguments[:1]:
            self.calls.append((name, *arguments))

    def _open(self, path, flags, mode=0o777, *, dir_fd=None):
        new = False
        if flags & os.O_CREAT:
            with contextlib.suppress(OSError):
                new = True
                os.stat(path, dir_fd=dir_fd)
                new = False
        descriptor = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if new:
            parent, name = self._parent(path, dir_fd)
            self._note("create", parent, name, self._new(os.fstat(descriptor).st_ino))
        return descriptor

    def _write(self, descriptor, data):
        count = self._real["write"](descriptor, data)
        self._content(descriptor)
        return count

    def _pwrite(self, descriptor, data, offset):
        count = self._real["pwrite"](descriptor, data, offset)
        self._content(descriptor)
        return count

    def _content(self, descriptor):
        number = self._number(descriptor)
        if number is not None:
            self._note("content", number, Path(f"/proc/self/fd/{descriptor}").read_bytes())

    def _fsync(self, descriptor):
        self._real["fsync"](descriptor)
        frames = traceback.extract_stack()
        functions = [frame.name for frame in frames if "/hvdkit/checkpoint/" in frame.filename]
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.syncs.append((*functions, "" if path.is_dir() else path.name))
        if len(self.syncs) != self.skipped:
            self._note("sync", self._number(descriptor))

    def _mkdir(self, path, mode=0o777, *, dir_fd=None):
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        parent, name = self._parent(path, dir_fd)
        self._note("mkdir", parent, name, self._new(os.stat(path, dir_fd=dir_fd).st_ino))

    def _rename(self, old, new, *, src_dir_fd=None, dst_dir_fd=None):
        self._real["rename"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._note("rename", self._number(src_dir_fd), old, new)

    def _link(self, old, new, *, dst_dir_fd=None, **how):
        self._real["link"](old, new, dst_dir_fd=dst_dir_fd, **how)
        number = self._numbers[os.stat(new, dir_fd=dst_dir_fd).st_ino]
        self._note("link", self._number(dst_dir_fd), new, number)

    def _unlink(self, path, *, dir_fd=None):
        self._real["unlink"](path, dir_fd=dir_fd)
        self._note("remove", *self._parent(path, dir_fd))

    def _rmdir(self, path, *, dir_fd=None):
        self._real["rmdir"](path, dir_fd=dir_fd)
        self._note("remove", *self._parent(path, dir_fd))


class Disk:
    """The disk after the first `count` calls.

    Args:
        root: the number of the folder.
        calls: as `Recorder.calls`.
        count: how many of them.
    """

    def __init__(self, root, calls, count):
        self._root = root
        self._folders = {root}
        self._synced = {}
        self._content = {}
        # The synced changes of each folder, and the others.
        self._durable = {root: []}
        self._pending = {root: []}
        for name, *arguments in calls[:count]:
            getattr(self, f"_on_{name}")(*arguments)

    def _on_create(self, parent, name, number):
        self._on_link(parent, name, number)

    def _on_link(self, parent, name, number):
        self._pending[parent].append(("add", name, number))

    def _on_mkdir(self, parent, name, number):
        self._folders.add(number)
        self._durable[number], self._pending[number] = [], []
        self._on_link(parent, name, number)

    def _on_rename(self, parent, old, new):
        self._pending[parent].append(("rename", old, new))

    def _on_remove(self, parent, name):
        self._pending[parent].append(("remove", name, None))

    def _on_content(self, number, content):
        self._content[number] = content

    def _on_sync(self, number):
        if number in self._folders:
            self._durable[number] += self._pending[number]
            self._pending[number] = []
        elif number in self._content:
            self._synced[number] = self._content[number]

    def after_power_cut(self, target, survives):
        """Make the folder `target` as the disk may have it after a power cut.

        Args:
            target: the new folder.
            survives: called for each change that was not synced; returns whether it survives.
        """
        self._make(self._root, target, survives)

    def _make(self, folder, target, survives):
        target.mkdir()
        names = {}
        pending = [change for change in self._pending[folder] if survives(change)]
        for kind, name, argument in self._durable[folder] + pending:
            if kind == "add":
                names[name] = argument
            elif kind == "remove":
                names.pop(name, None)
            elif name in names:
                names[argument] = names.pop(name)
        for name, number in names.items():
            if number in self._folders:
                self._make(number, target / name, survives)
            else:
                lost = number not in self._synced
                content = self._content.get(number, b"") if lost else self._synced[number]
                if lost and not survives(("content", name, None)):
                    content = b""
                (target / name).write_bytes(content)
