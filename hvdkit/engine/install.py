"""Install packages with pip."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from hvdkit.engine import script
from hvdkit.errors import HvdkitError
from hvdkit.system.processes import python_command

_SECONDS = 600


def check_pip() -> None:
    """Raise HvdkitError if this environment has no pip."""
    answer = subprocess.run(
        python_command("-m", "pip", "--version"), capture_output=True, timeout=60, check=False
    )
    if answer.returncode != 0:
        raise HvdkitError(
            f"{sys.executable} has no pip, which installs the engine. Install it: python -m "
            "ensurepip (or `uv pip install pip`)."
        )


def install_wheel(wheel: Path, target: Path | None = None) -> None:
    """Install `wheel` into this environment in place of any other Horovod, or into `target`.

    If pip fails, it restores the old version. Nothing else is installed: hvdkit's dependencies
    include those of Horovod.
    """
    # Without the index and without pip's cache, which identifies wheels by name and version only:
    # install exactly this file.
    arguments = ["--no-index", "--no-deps", "--no-cache-dir"]
    if target is None:
        arguments.append("--force-reinstall")
    else:
        arguments += ["--upgrade", "--target", str(target)]
    with _held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        _install(*arguments, str(wheel))
        if target is None:
            script.restore()


def install_tools(requirements: Sequence[str], folder: Path) -> None:
    """Install into `folder` the requirements that this environment does not satisfy."""
    missing = [text for text in requirements if not _satisfied(Requirement(text))]
    if missing:
        _install("--target", str(folder), *missing)


@contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Delay signals to this process and to pip: an interrupted pip leaves an incomplete package."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _satisfied(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


class PipFailed(HvdkitError):
    """pip has failed; the message is its first error."""


def pip(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> None:
    """Run pip, which has the user's index, proxy and certificates.

    Raises:
        PipFailed: it fails, or takes too long.
    """
    command = python_command("-m", "pip", "--disable-pip-version-check", "--no-input")
    try:
        answer = subprocess.run(
            [*command, *arguments],
            env=env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PipFailed(
            f"pip did not end within {_SECONDS} s. Check the network and the file system"
        ) from error
    if answer.returncode != 0:
        errors = [line for line in answer.stderr.splitlines() if line.startswith("ERROR:")]
        lines = errors or (answer.stderr.strip() or answer.stdout.strip()).splitlines()
        raise PipFailed(lines[0].removeprefix("ERROR: ") if lines else "pip printed no error")


def _install(*arguments: str) -> None:
    try:
        pip(["install", "--no-warn-script-location", *arguments])
    except PipFailed as error:
        raise HvdkitError(f"`pip install {' '.join(arguments)}` failed: {error}") from error
