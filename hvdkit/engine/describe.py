"""Describe the installed Horovod from its files, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.system.plain_files import read_json

#: The file in the `horovod` package that describes an engine of hvdkit.
RECORD = "hvdkit_engine.json"

#: Framework -> its extension in the `horovod` package, and its name in Horovod's metadata.json.
_FRAMEWORKS = {
    "torch": ("torch/mpi_lib_v2*.so", "pytorch"),
    "tensorflow": ("tensorflow/mpi_lib*.so", "tensorflow"),
}

#: The folder with the description of an installed Horovod; its name has the version.
_DISTRIBUTION = "horovod-*.dist-info"


class EngineMissing(HvdkitError, ImportError):
    """An adapter was imported without a Horovod that has the extension for its framework."""


@dataclass(frozen=True)
class Engine:
    """An installed Horovod.

    Attributes:
        version: such as `0.28.1+hvdkit.1`, or `0.28.1` for stock Horovod.
        path: the folder of the `horovod` package.
        frameworks: framework -> the version that its extension was compiled against.
        record: the record of `hvdkit build`; empty for stock Horovod.
    """

    version: str
    path: Path
    frameworks: Mapping[str, str]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it was built by `hvdkit build`."""
        return bool(self.record)

    @property
    def patches(self) -> tuple[str, ...]:
        """The names of its patches; see `hvdkit build --list-patches`."""
        return tuple(self.record.get("patches", ()))

    @property
    def controllers(self) -> tuple[str, ...] | None:
        """The compiled controllers; None if unknown, for stock Horovod."""
        return tuple(self.record["controllers"]) if self.ours else None

    @property
    def gpu(self) -> str | None:
        """`nccl`, `staged` or `none`; None if unknown, for stock Horovod."""
        return str(self.record["gpu"]) if self.ours else None


def installed(target: Path | None = None) -> Engine | None:
    """Describe the Horovod in the environment, or in the folder `target`.

    Returns:
        The engine; None if there is none.
    """
    path = [str(target)] if target else sys.path
    # Not with importlib.metadata, whose import takes long.
    for distribution in (found for folder in path for found in Path(folder).glob(_DISTRIBUTION)):
        package = distribution.parent / "horovod"
        if package.is_dir():
            return Engine(
                version=distribution.stem.split("-")[1],
                path=package,
                frameworks=_frameworks(package),
                record=_json(package / RECORD),
            )
    return None


def require(framework: str) -> Engine:
    """Return the installed Horovod, which must have the extension for `framework`.

    Raises:
        EngineMissing: no Horovod with this extension is installed; the message has the command
            that installs one.
    """
    engine = installed()
    if engine is None:
        raise EngineMissing(
            f"hvdkit.{framework} needs Horovod, and none is installed. "
            f"Run `hvdkit build` (about 8 minutes the first time, seconds after that)."
        )
    if framework not in engine.frameworks:
        has = ", ".join(engine.frameworks) or "no framework"
        raise EngineMissing(
            f"hvdkit.{framework} needs a Horovod built for {framework}, but the installed Horovod "
            f"{engine.version} is for {has}. Run `hvdkit build --frameworks "
            f"{','.join([*engine.frameworks, framework])}`."
        )
    return engine


def _frameworks(package: Path) -> dict[str, str]:
    versions = _json(package / "metadata.json")
    return {
        framework: str(versions.get(name, "unknown"))
        for framework, (extension, name) in _FRAMEWORKS.items()
        if any(package.glob(extension))
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise HvdkitError(
            f"{path} is damaged ({error}). Install the engine again: `hvdkit build`."
        ) from error
    return dict(content)
