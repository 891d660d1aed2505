"""Find out whether another user could replace a file, such as one whose code this user runs."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path


def untrusted(path: Path) -> str:
    """Return how another user could replace a file or folder; "" if none could.

    Checks the owner and the mode of `path`, and of every folder and link on the way to it.

    Raises:
        OSError: there is no such file.
    """
    path.resolve(strict=True)
    for part in _way(path.absolute()):
        found = part.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{part} belongs to user {_user_name(found.st_uid)}"
        if stat.S_ISLNK(found.st_mode):
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
            continue  # Others may add files, but not replace them.
        if found.st_mode & stat.S_IWOTH:
            return f"all users may write to {part}"
        if found.st_mode & stat.S_IWGRP and _has_list(part):
            return f"its access control list lets others write to {part}"
        if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
            return f"its group may write to {part}"
    return ""


def _way(path: Path) -> Iterator[Path]:
    """Yield the folders and links through which the system finds an absolute path, and its end.

    A link may lead to a link in a folder of another user, which leads to a file of this user.
    """
    here = Path(path.root)
    yield here
    left = list(path.parts[:0:-1])
    while left:
        if (name := left.pop()) == "..":
            here = here.parent
            continue
        yield here / name
        if not (here / name).is_symlink():
            here /= name
            continue
        leads_to = (here / name).readlink()
        if leads_to.is_absolute():
            here = Path(leads_to.root)
        left += [part for part in leads_to.parts[::-1] if part != leads_to.root]


def _has_list(path: Path) -> bool:
    """Return whether a path has an access control list. Its mask are the bits of the group."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError:
        return False


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _is_private(group: int) -> bool:
    """Return whether this user is the only member of a group, which has the user's name.

    A directory server may not list all users, so a group without known members may have some.
    """
    try:
        found = grp.getgrgid(group)
        own = pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    primary = [user.pw_name for user in pwd.getpwall() if user.pw_gid == group]
    return {found.gr_name, *found.gr_mem, *primary} == {own.pw_name}
