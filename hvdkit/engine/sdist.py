"""Horovod's source distribution: from the package index, the cache, or a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from hvdkit.engine import cache, toolchain
from hvdkit.engine.fixes import HOROVOD_VERSION
from hvdkit.errors import HvdkitError, UsageError

NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_DOWNLOAD_SECONDS = 600


def obtain(given: Path | None, tools: Path) -> Path:
    """The verified sdist: the file `given`, else the cached one, else a download.

    Args:
        given: the user's `--sdist`.
        tools: folder with the build packages: pip runs the sdist's setup.py for its metadata.

    Raises:
        UsageError: `given` is not the pinned sdist.
        HvdkitError: it could not be downloaded.
    """
    if given is not None:
        if not given.is_file():
            raise UsageError(f"--sdist {given}: there is no such file; expected {NAME}.")
        found = cache.sha256(given)
        if found != SHA256:
            raise UsageError(
                f"--sdist {given} has sha256 {found}; expected {NAME} as on the package index, "
                f"sha256 {SHA256}. Nothing was done with it."
            )
        return given
    kept = cache.folder() / "sdist" / NAME
    if kept.is_file() and cache.sha256(kept) == SHA256:
        return kept
    with cache.staging(kept.parent) as new:
        downloaded = _download(new, tools)
        downloaded.replace(kept)
    return kept


def unpack(sdist: Path, into: Path) -> Path:
    """Unpack `sdist` and return the source tree's folder."""
    with tarfile.open(sdist) as archive:
        # By name and not as an argument, which Python before 3.11.4 does not know; there all is
        # extracted as it is, which is known by its hash.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(into)
    return into / NAME.removesuffix(".tar.gz")


def _download(into: Path, tools: Path) -> Path:
    """Let pip fetch it: it knows the user's index, proxy, certificates and passwords.

    pip checks the hash before it runs anything of what it fetched.
    """
    requirements = into / "requirements.txt"
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:"]
    command += ["--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--retries=2", "--require-hashes", "--dest", str(into)]
    try:
        answer = subprocess.run(
            [*command, "--requirement", str(requirements)],
            env=os.environ | {"PYTHONPATH": toolchain.python_path(tools)},
            cwd=into,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HvdkitError(
            f"{NAME} did not arrive within {_DOWNLOAD_SECONDS} s. {_WITHOUT_NETWORK}"
        ) from error
    if answer.returncode != 0:
        errors = [line for line in answer.stderr.splitlines() if line.startswith("ERROR:")]
        reason = (errors or answer.stderr.strip().splitlines() or ["pip said nothing"])[0]
        raise HvdkitError(
            f"{NAME} cannot be fetched from the package index: {reason.removeprefix('ERROR: ')} "
            f"{_WITHOUT_NETWORK}"
        )
    return into / NAME


_WITHOUT_NETWORK = (
    f"Without a network, bring the file along (pip download --no-deps --no-binary :all: "
    f"horovod=={HOROVOD_VERSION} on a machine with one) and give it as --sdist FILE."
)
