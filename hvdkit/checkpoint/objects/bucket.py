"""Objects under one URL, through fsspec, with deadlines and retries for each request.

The file systems of fsspec (https://filesystem-spec.readthedocs.io) raise many kinds of errors. For
a missing object, the methods here return None or raise FileNotFoundError. They convert every other
error to a `CheckpointError`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.objects.content import Content
from hvdkit.checkpoint.objects.file_system import Address, FileSystem
from hvdkit.errors import UsageError

_log = logging.getLogger(__name__)

#: The deadline of a request in seconds, plus seconds for each byte that it sends or receives.
REQUEST_SECONDS = 60.0
SECONDS_PER_BYTE = 1e-6
#: The deadline of a heartbeat in seconds. A heartbeat is not retried.
SOON_SECONDS = 10.0
#: Seconds before the first retry of a request, and the most seconds before a later retry.
FIRST_PAUSE_SECONDS = 0.3
LONGEST_PAUSE_SECONDS = 10.0
#: Seconds after which a request is not retried.
RETRY_SECONDS = 120.0
#: The limits before the first reply of the store, which are shorter: the address may be wrong.
FIRST_RETRY_SECONDS = 10.0
FIRST_REQUEST_SECONDS = 15.0

#: Bytes of a part of a multipart upload, and the number of parts sent at the same time.
_PART_BYTES = 16 * 2**20
_PARTS_AT_ONCE = 4
#: S3's limit is 10,000 parts; Google's parts are multiples of this many bytes.
_MAX_PARTS = 9_000
_PART_UNIT = 2**18

# Errors that a retry cannot mend; S3's NotImplemented, an OSError with ENOSYS, is another.
_LASTING = (
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
    AttributeError,
)

# Not the functions of the module `random`: a retry would change the random numbers of the training.
_jitter = random.Random()

#: Attempts to check for exclusive creation. Another process may delete the object of an attempt.
_PROBES = 3


class Bucket:
    """The objects under a URL. The constructor sends no request.

    Attributes:
        url: the URL, without a password.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Args:
            url: such as `s3://bucket/run`.
            options: for fsspec's file system.

        Raises:
            UsageError: fsspec is not installed or does not know the protocol.
        """
        address = self._address = Address.of(url)
        self.url = address.shown
        self._options = dict(options)
        self._opened: FileSystem | None = None
        self._reached = False
        try:
            from fsspec.registry import available_protocols
        except ImportError as error:
            raise address.not_installed(error) from error
        if address.extra and address.password is not None:
            raise UsageError(
                f"the checkpoint URL {self.url} has a password. Give the password in "
                f"storage_options or in the environment."
            )
        unusable = address.protocol in ("http", "https") or "::" in url
        if unusable or not address.path or address.protocol not in available_protocols():
            raise UsageError(
                f"the checkpoint URL is {self.url}; expected a path, or a URL that fsspec knows, "
                f"such as s3://bucket/run, gs://bucket/run or abfs://container/run."
            )

    @property
    def identity(self) -> Hashable:
        """A value that is equal for two objects with the same URL and options."""
        opened = self._file_system()
        options = repr(sorted(self._options.items()))
        return type(opened.fs).__name__, opened.root.strip("/"), options

    def read(self, name: str, most: int, size: int | None = None) -> bytes | None:
        """Return an object's content; None if it is missing.

        Args:
            name: of the object.
            most: bytes. A larger object is not read, because it could fill the memory.
            size: its size in bytes, if it is known and no process changes it.

        Raises:
            Damaged: it has more than `most` bytes.
        """
        size = self.size(name) if size is None else size
        if size is not None and size > most:
            raise Damaged(name, f"it has {size} bytes; expected at most {most}")
        # A range of no bytes is an error.
        return self._read_range(name, 0, most) if size else None if size is None else b""

    def _read_range(self, name: str, start: int, end: int) -> bytes | None:
        """Return an object's bytes from `start` to `end`, if it has them; None if it is missing."""
        # Without this argument, s3fs first requests the size.
        known = self._file_system().parameters("cat_file")
        how: dict[str, Any] = {"max_concurrency": 1} if "max_concurrency" in known else {}
        try:
            content: bytes = self._request(
                *("read", name, "cat_file", self._path(name)),
                start=start,
                end=end,
                size=end - start,
                **how,
            )
        except FileNotFoundError:
            return None
        return content

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Read several byte ranges at the same time; None if the object is missing."""
        if not self._file_system().asynchronous:
            found = [self._read_range(name, start, end) for start, end in ranges]
            return None if None in found else [each for each in found if each is not None]
        paths = [self._path(name)] * len(ranges)
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            contents: list[bytes] = self._request(
                *("read", name, "cat_ranges", paths, starts, ends),
                on_error="raise",
                size=sum(ends) - sum(starts),
            )
        except FileNotFoundError:
            return None
        return contents

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if it is missing."""
        try:
            return int(self._request("read", name, "info", self._path(name))["size"])
        except FileNotFoundError:
            return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return names and sizes in bytes of all objects in the folder `prefix`.

        If the store's listings are eventually consistent, an object may be missing, or a deleted
        one listed.
        """
        try:
            found = self._request("list", prefix, "find", self._path(prefix), detail=True)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error.__cause__):
                raise self._no_place(error) from error
            return {}
        before = self._file_system().root.rstrip("/") + "/"
        return {
            path.removeprefix(before): int(info["size"] or 0)
            for path, info in found.items()
            if info["type"] == "file" and path.startswith(before)
        }

    def write(self, name: str, data: bytes) -> None:
        """Write a small object. Overwrite an existing one."""
        self._put(name, data)

    def write_soon(self, name: str, data: bytes) -> None:
        """Write a small object once, with a short deadline and no retry."""
        try:
            self._call("pipe_file", self._path(name), data, seconds=SOON_SECONDS)
        except Exception as error:
            raise CheckpointError(f"cannot write {self.url}/{name}: {self._text(error)}") from error

    def create(self, name: str, data: bytes) -> bool:
        """Create a small object; fail if it exists.

        Args:
            name: of the object.
            data: its content, unique to this call.

        Returns:
            True if the object has this content now; False if it has another.

        Raises:
            CheckpointError: it is unknown whether the object exists.
        """

        def try_once() -> bool:
            try:
                self._call("pipe_file", self._path(name), data, mode="create")
            except Exception as error:
                if _is_lasting(error):
                    raise
                # The object exists; or the reply to this request, or to an earlier one, was lost.
                size = self.size(name)
                if size is None:
                    raise
                return size == len(data) and self.read(name, size) == data
            return True

        try:
            return bool(self._tried("write", name, try_once))
        except FileNotFoundError as error:
            raise self._no_place(error) from error

    def expect_exclusive_create(self, name: str) -> None:
        """Check that the store refuses to create an object that exists.

        Args:
            name: the prefix of objects that no other process creates. Another process may delete
                them.

        Raises:
            CheckpointError: the store overwrites an object, or refuses conditional requests.
        """
        try:
            for attempt in range(_PROBES):
                if self._refuses_second_create(f"{name}-{attempt}.json"):
                    return
        except CheckpointError as error:
            if _errno(error.__cause__) != errno.ENOSYS:
                raise
            found = f"it refused to create an object exclusively ({self._text(error.__cause__)})"
            raise self._unconditional(found) from error
        raise self._unconditional("it overwrote an existing object on an exclusive create")

    def _refuses_second_create(self, name: str) -> bool:
        """Create an object, try to create it again, and delete it.

        If deleting fails, log a warning: the next writer deletes the object.
        """

        def create_again() -> bool:
            try:
                self._call("pipe_file", self._path(name), b"second", mode="create")
            except FileExistsError:
                return True
            except OSError as error:
                # For S3's PreconditionFailed, s3fs raises EINVAL. The request was valid before.
                if error.errno == errno.EINVAL:
                    return True
                raise
            return False

        self.create(name, b"first")
        try:
            return bool(self._tried("write", name, create_again))
        finally:
            try:
                self.delete([name])
            except CheckpointError as error:
                _log.warning("%s/%s was not deleted yet: %s", self.url, name, error)

    def _unconditional(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"the store of {self.url} does not support conditional writes: {found}. Without them "
            f"two jobs could overwrite each other's checkpoints. Expected a store that creates an "
            f"object only if it does not exist (S3: PutObject with If-None-Match: *). Update the "
            f"store, use one that is listed in docs/object-stores.md, or give a folder."
        )

    def upload(self, name: str, content: Content) -> None:
        """Write a large object, in several parts at once if the file system supports it."""
        data: Any = content
        how: dict[str, Any] = {}
        parameters = self._file_system().parameters("pipe_file")
        part = -(-max(_PART_BYTES, len(content) // _MAX_PARTS) // _PART_UNIT) * _PART_UNIT
        if "max_concurrency" in parameters:
            how["max_concurrency"] = _PARTS_AT_ONCE
        if "chunksize" in parameters:
            how["chunksize"] = part
        if self._address.extra != "s3" or len(content) < 2 * part:
            # Only s3fs, and only for large objects, accepts content that is not one piece of
            # memory.
            data = content[:]
        self._put(name, data, **how)

    def copy(self, name: str, new: str) -> None:
        """Copy an object on the server.

        On Azure, copy it through this process, because Azure does not report the end of a copy.

        Raises:
            FileNotFoundError: the object is missing.
        """
        if self._address.extra == "azure":
            size = self.size(name)
            content = None if size is None else self.read(name, size)
            if content is None:
                raise FileNotFoundError(name)
            self._put(new, content)
            return
        size = self.size(name) or 0
        self._request("copy", name, "cp_file", self._path(name), self._path(new), size=size)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. Missing objects count as deleted."""
        for name in names:
            # One by one: `rm` expands `[` and `*` as patterns, and s3fs ignores objects that were
            # not deleted.
            with contextlib.suppress(FileNotFoundError):
                self._request("delete", name, "rm_file", self._path(name))

    def _put(self, name: str, data: Any, **how: Any) -> None:
        try:
            self._request("write", name, "pipe_file", self._path(name), data, size=len(data), **how)
        except FileNotFoundError as error:
            raise self._no_place(error) from error

    def _no_place(self, error: FileNotFoundError) -> CheckpointError:
        return CheckpointError(
            f"cannot use {self.url}: {self._text(error)}. Create the bucket, or give another "
            f"address."
        )

    def _request(
        self, action: str, name: str, method: str, *arguments: Any, size: int = 0, **keywords: Any
    ) -> Any:
        """Call a method of the file system, with retries.

        Raises:
            FileNotFoundError: the object is missing.
            CheckpointError: all attempts failed, or a retry cannot help.
        """
        return self._tried(
            action, name, lambda: self._call(method, *arguments, size=size, **keywords)
        )

    def _call(
        self,
        method: str,
        *arguments: Any,
        size: int = 0,
        seconds: float | None = None,
        **keywords: Any,
    ) -> Any:
        """Call a method of the file system once; with a deadline if it is asynchronous."""
        opened = self._file_system()
        if opened.asynchronous:
            most = REQUEST_SECONDS if self._reached else FIRST_REQUEST_SECONDS
            keywords["timeout"] = seconds or most + SECONDS_PER_BYTE * size
        opened.fs.invalidate_cache()
        return getattr(opened.fs, method)(*arguments, **keywords)

    def _tried(self, action: str, name: str, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        pause = FIRST_PAUSE_SECONDS
        self._file_system()
        for tries in itertools.count(1):
            try:
                result = call()
                self._reached = True
                return result
            except CheckpointError:
                raise
            except Exception as error:
                # S3 no longer knows a multipart upload whose last reply was lost. Repeat it.
                repeated = "NoSuchUpload" in str(error.__cause__)
                if isinstance(error, FileNotFoundError) and not repeated:
                    self._reached = True
                    raise
                limit = RETRY_SECONDS if self._reached else FIRST_RETRY_SECONDS
                late = time.monotonic() - began > limit
                # The first attempt of a long request may take all of the time: repeat it once.
                if _is_lasting(error) or (late and (tries > 1 or not self._reached)):
                    advice = self._advice(error)
                    # Give up sooner on the next request, because the store may be gone.
                    self._reached = False
                    raise CheckpointError(
                        f"cannot {action} {self.url}/{name}: {self._text(error)}. " + advice
                    ) from error
                _log.warning("retrying to %s %s/%s: %s", action, self.url, name, self._text(error))
            # A random pause, so that not all clients retry at once.
            time.sleep(pause * _jitter.uniform(0.5, 1.5))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _advice(self, error: Exception) -> str:
        if self._reached:
            return (
                "Check access rights and connection; the steps that `hvdkit checkpoint ls` lists "
                "are complete."
            )
        if isinstance(error, TypeError | ValueError) and self._options:
            return f"Check storage_options, which has {', '.join(sorted(self._options))}."
        return "Check the address, the access rights and the connection."

    def _text(self, error: BaseException) -> str:
        """Return the message of an error in one line, without the password."""
        if isinstance(error, TimeoutError):
            return "no reply in time"
        text = " ".join(str(error).split())
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        password = self._address.password
        return text.replace(password, "***") if password else text

    def _file_system(self) -> FileSystem:
        opened = self._opened
        if opened is None or opened.process != os.getpid():
            try:
                opened = self._opened = FileSystem.open(self._address, self._options)
            except ImportError as error:
                raise self._address.not_installed(error) from error
            except Exception as error:
                raise CheckpointError(f"cannot open {self.url}: {self._text(error)}.") from error
        return opened

    def _path(self, name: str) -> str:
        return self._file_system().path(name)


def _is_lasting(error: BaseException) -> bool:
    return isinstance(error, _LASTING) or _errno(error) == errno.ENOSYS


def _errno(error: BaseException | None) -> int | None:
    return error.errno if isinstance(error, OSError) else None
