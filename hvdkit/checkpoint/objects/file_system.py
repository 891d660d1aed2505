"""The file system of fsspec for a URL, in one process."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdkit.errors import UsageError

#: Options for S3's client: its timeouts, and no retries, because `Bucket` retries.
_S3_CONFIG = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}

# Protocol -> the extra of hvdkit with its package.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_EXTRAS |= dict.fromkeys(("abfs", "abfss", "az"), "azure")


@dataclass(frozen=True)
class Address:
    """A URL.

    Attributes:
        protocol: in lower case.
        path: what follows the protocol.
        password: the password in the URL; None without one.
    """

    protocol: str
    path: str = field(repr=False)
    password: str | None = field(repr=False)

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse a URL."""
        protocol, _, rest = url.partition("://")
        # Some file systems do not list objects whose path has two slashes in a row.
        rest = re.sub("/{2,}", "/", rest).rstrip("/")
        found = re.match("[^/:@]*:([^/@]*)@", rest)
        return cls(protocol.lower(), rest, found[1] if found else None)

    @property
    def url(self) -> str:
        """The URL."""
        return f"{self.protocol}://{self.path}"

    @property
    def shown(self) -> str:
        """The URL without the password."""
        return f"{self.protocol}://" + re.sub("^([^/:@]*):[^/@]*@", r"\1:***@", self.path)

    @property
    def extra(self) -> str:
        """The extra of hvdkit with the package for the protocol; empty for other protocols."""
        return _EXTRAS.get(self.protocol, "")

    def not_installed(self, error: ImportError) -> UsageError:
        """Return the error that the package for the protocol is missing."""
        to_do = "install fsspec's package for it"
        if self.extra:
            to_do = f"pip install 'hvdkit[{self.extra}]'"
        return UsageError(f"the checkpoint URL is {self.shown}: {error}. To do: {to_do}.")


@dataclass(frozen=True)
class FileSystem:
    """A file system, and the place of the URL in it.

    Attributes:
        fs: the file system.
        root: the path of the URL.
        asynchronous: whether requests have a deadline, and several can be sent at the same time.
        process: the process that it works in: not in a process that was forked after its first
            request.
    """

    fs: Any
    root: str
    asynchronous: bool
    process: int

    @classmethod
    def open(cls, address: Address, options: Mapping[str, Any]) -> FileSystem:
        """Make the file system of a URL.

        Args:
            address: the URL.
            options: for the file system.

        Raises:
            ImportError: the package for the protocol is not installed.
            Exception: any error of the file system, such as one of its options.
        """
        import fsspec
        from fsspec.asyn import AsyncFileSystem

        kind = fsspec.get_filesystem_class(address.protocol)
        options = dict(options)
        asynchronous = issubclass(kind, AsyncFileSystem)
        if asynchronous:
            options["use_listings_cache"] = False
        if address.extra == "s3":
            options["config_kwargs"] = _S3_CONFIG | options.get("config_kwargs", {})
        fs, root = fsspec.core.url_to_fs(address.url, **options)
        return cls(fs, root, asynchronous, os.getpid())

    def parameters(self, method: str) -> Mapping[str, Any]:
        """Return the parameters of a method, including those that only this file system has."""
        plain = getattr(self.fs, method)
        return inspect.signature(getattr(self.fs, "_" + method, plain)).parameters

    def path(self, name: str) -> str:
        """Return the path of an object."""
        return f"{self.root.rstrip('/')}/{name}".rstrip("/")
