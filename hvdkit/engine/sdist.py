"""Get Horovod's source distribution from the package index, the cache or a file; unpack it."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from hvdkit.engine import cache, install, toolchain
from hvdkit.engine.patches import HOROVOD_VERSION
from hvdkit.errors import HvdkitError, UsageError

NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def check(given: Path) -> None:
    """Check the file of `--sdist`.

    Raises:
        UsageError: `given` is not the expected sdist.
    """
    if not given.is_file():
        raise UsageError(f"--sdist {given}: there is no such file; expected {NAME}.")
    _check_hash(given, given)


def _check_hash(file: Path, given: Path) -> None:
    found = cache.sha256(file)
    if found != SHA256:
        raise UsageError(
            f"--sdist {given} has sha256 {found}; expected {NAME} as on the package index, "
            f"sha256 {SHA256}. The file was not used."
        )


def obtain(given: Path | None, tools: Path, into: Path) -> Path:
    """Return the verified sdist: a copy of the file `given` or of the cached one, or a download.

    Args:
        given: the argument of `--sdist`.
        tools: the folder with the build packages, which pip needs to run setup.py for the metadata.
        into: the folder for the file, to which nobody else can write. Another user might replace
            `given` after the check of its hash.

    Raises:
        UsageError: `given` is not the expected sdist.
        HvdkitError: the sdist could not be downloaded, or the cache cannot be used.
    """
    copy = into / NAME
    if given is not None:
        check(given)
        shutil.copyfile(given, copy)
        _check_hash(copy, given)
        return copy
    kept = cache.make(cache.folder() / "sdist") / NAME
    if kept.is_file():
        shutil.copyfile(kept, copy)
        if cache.sha256(copy) == SHA256:
            return copy
    downloaded = _download(into, tools)
    with cache.staging(kept.parent) as new:
        Path(shutil.copy(downloaded, new)).replace(kept)
    return downloaded


def unpack(sdist: Path, into: Path) -> Path:
    """Unpack `sdist` and return the folder of the source tree."""
    with tarfile.open(sdist) as archive:
        # Set the filter as an attribute: before Python 3.11.4, extractall() has no argument for
        # it and does not filter. That is safe, because the hash of the archive was checked.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(into)
    return into / NAME.removesuffix(".tar.gz")


def _download(into: Path, tools: Path) -> Path:
    """Download the sdist with pip, which checks the hash before it runs code of the sdist."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SHA256}\n")
    command = ["download", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
    command += ["--no-cache-dir", "--progress-bar=off", "--retries=2", "--require-hashes"]
    command += ["--dest", str(into), "--requirement", str(requirements)]
    environment = os.environ | {"PYTHONPATH": toolchain.python_path(tools)}
    try:
        install.pip(command, environment, into)
    except install.PipFailed as error:
        raise HvdkitError(
            f"{NAME} cannot be downloaded from the package index: {error} {_WITHOUT_NETWORK}"
        ) from error
    return into / NAME


_WITHOUT_NETWORK = (
    f"Without a network, copy the file from another machine (pip download --no-deps --no-binary "
    f":all: horovod=={HOROVOD_VERSION}) and give it as --sdist FILE."
)
