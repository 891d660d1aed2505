"""Build an engine: tools, sources, patches, compilation, smoke test, cache and installation.

The wheel enters the cache after the smoke test. The installed engine changes in the last step only.
All steps use files in a private temporary folder: other users may share the cache.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdkit.console.tables import Console
from hvdkit.engine import (
    cache,
    describe,
    install,
    patches,
    script,
    sdist,
    smoke_test,
    toolchain,
)
from hvdkit.engine.plan import Plan
from hvdkit.engine.progress import BuildProgress
from hvdkit.errors import HvdkitError
from hvdkit.system.processes import kill_group, wait_for_end, wait_for_killed
from hvdkit.system.whole_files import replacing

#: The timeout of a build. The slowest measured took 8 minutes on 2 cores.
_SECONDS = 2 * 3600

_LOGS_KEPT = 20

#: The beginning of error lines of compilers, CMake and linkers.
_ERROR = re.compile(r"error:|^CMake Error|undefined reference")


@dataclass(frozen=True)
class Options:
    """The inputs and outputs of a build.

    Attributes:
        sdist: a file with Horovod's sdist; None for the cached sdist or a download.
        wheel_dir: a folder for a copy of the wheel; None for no copy.
        target: the folder to install into; None for this Python's environment.
        use_cache: take the wheel from the cache if the cache has it.
    """

    sdist: Path | None = None
    wheel_dir: Path | None = None
    target: Path | None = None
    use_cache: bool = True


def build(plan: Plan, options: Options, console: Console) -> describe.Engine:
    """Carry out `plan`. Return the installed engine.

    Raises:
        HvdkitError: a step failed. If it was a step before the installation, the engine that was
            installed before is unchanged. A wheel that has passed the smoke test stays in the
            cache.
    """
    started = time.monotonic()
    install.check_pip()
    if options.sdist is not None:
        sdist.check(options.sdist)
    engine = describe.installed(options.target)
    if options.use_cache and options.wheel_dir is None and engine and _matches(engine, plan):
        if options.target is None:
            script.restore()
        console.print(f"This engine, {engine.version}, is already installed.")
        return engine
    with _scratch() as scratch:
        wheel = cache.lookup(plan.key, scratch) if options.use_cache else None
        if wheel is not None:
            console.print(f"Engine {plan.version} is in the cache.")
        else:
            wheel = _make(plan, options, scratch, console)
        if options.wheel_dir is not None:
            kept = _copy(wheel, options.wheel_dir)
            console.print(f"Wheel: {kept}")
        install.install_wheel(wheel, options.target)
    engine = describe.installed(options.target)
    if engine is None or not _matches(engine, plan):
        found = f"Horovod {engine.version} in {engine.path}" if engine else "no Horovod"
        raise HvdkitError(
            f"pip installed {wheel.name}, but Python finds {found}. Expected the installed engine. "
            "Remove the other Horovod from sys.path."
        )
    console.print(
        f"Installed Horovod {engine.version} for {', '.join(engine.frameworks)} over "
        f"{', '.join(plan.controllers)} into {engine.path.parent} "
        f"({time.monotonic() - started:.0f} s)."
    )
    return engine


def _copy(wheel: Path, folder: Path) -> Path:
    """Copy the wheel into the folder of `--wheel-dir`, and return the copy."""
    copy = folder / wheel.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(copy) as draft:
            shutil.copyfile(wheel, draft)
    except OSError as error:
        raise HvdkitError(
            f"--wheel-dir {folder}: the wheel cannot be copied to {copy} ({error.strerror}). Give "
            "a folder that you can write to, without links of other users"
        ) from error
    return copy


def _matches(engine: describe.Engine, plan: Plan) -> bool:
    """Return whether `engine` was built by `plan`."""
    return bool(engine.record.get("key") == plan.key)


def _make(plan: Plan, options: Options, scratch: Path, console: Console) -> Path:
    """Build and test the wheel of `plan` in `scratch`, and store a copy of it in the cache."""
    cache.make(cache.folder())
    toolchain.check_disk(Path(tempfile.gettempdir()))
    toolchain.check_disk(cache.folder())
    tools = scratch / "tools"
    install.install_tools(plan.build_requirements(), tools)
    source = sdist.obtain(options.sdist, tools, scratch)
    tree = sdist.unpack(source, scratch)
    patches.apply(plan.patches, tree)
    record = plan.ingredients | {"key": plan.key}
    (tree / "horovod" / describe.RECORD).write_text(json.dumps(record, indent=2))
    wheel = _compile(plan, tree, tools, scratch / "dist", console)
    engine = scratch / "engine"
    install.install_wheel(wheel, engine)
    console.print("Smoke test: collectives in new processes.")
    smoke_test.run(
        engine,
        [framework.name for framework in plan.frameworks],
        plan.controllers,
        plan.mpi.mpirun if plan.mpi else None,
        lambda line: console.print(f"  {line}"),
    )
    cache.store(plan.key, wheel, record)
    return wheel


def _compile(plan: Plan, tree: Path, tools: Path, dist: Path, console: Console) -> Path:
    log = _log_file()
    console.print(f"Building Horovod {plan.version}; the full log is {log}")
    with log.open("w", encoding="utf-8") as stream, BuildProgress(console, "compiling") as progress:
        command = plan.command(dist)
        environment = plan.environment(tools, tree)
        stream.write(f"# {json.dumps(plan.ingredients)}\n# {' '.join(command)}\n")
        tail: list[str] = []
        try:
            with _running(command, environment, tree) as (process, lines):
                for line in lines:
                    stream.write(line)
                    progress.update(line)
                    tail = [*tail[-200:], line]
                status = wait_for_end(process)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise HvdkitError(f"the disk of {log.parent} is full. Free some space.") from error
            raise
    if status != 0:
        raise HvdkitError(_diagnosis(status, tail, log))
    wheels = list(dist.glob("horovod-*.whl"))
    if len(wheels) != 1:
        raise HvdkitError(
            f"the build succeeded, but wrote {len(wheels)} wheels; expected one. See {log}"
        )
    return wheels[0]


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """Run the build in its own process group for the duration of a block."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    output = process.stdout

    expired = threading.Event()

    def expire() -> None:
        expired.set()
        kill_group(process)

    # A build that hangs may print nothing, so the reader cannot check the time.
    timer = threading.Timer(_SECONDS, expire)
    timer.daemon = True
    timer.start()

    def lines() -> Iterator[str]:
        yield from output
        if expired.is_set():
            raise HvdkitError(
                f"the build did not end within {_SECONDS / 3600:g} hours; nothing was changed. "
                "Build on a machine with more cores, and copy the wheel (--wheel-dir)."
            )

    try:
        yield process, lines()
    finally:
        timer.cancel()
        timer.join()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if wait_for_end(process, 0) is None:
                kill_group(process, number)
                wait_for_end(process, 5)
        wait_for_killed(process)
        output.close()


def _diagnosis(status: int | None, tail: Sequence[str], log: Path) -> str:
    """Return why a build failed, from its last lines."""
    text = "".join(tail)
    if "No space left on device" in text:
        reason = (
            f"the disk is full: a build needs {toolchain.DISK_BYTES / 1e9:.0f} GB in "
            f"{tempfile.gettempdir()}. Free some space, or set TMPDIR."
        )
    elif "Killed signal terminated program cc1plus" in text or "out of memory" in text:
        reason = "the compiler ran out of memory. Build with fewer --jobs."
    else:
        lines = [line.strip() for line in tail]
        first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), None)
        shown = lines[-15:] if first is None else lines[first : first + 5]
        reason = "\n".join(filter(None, shown))
    return (
        f"the build failed (exit status {status}); nothing was changed. {reason}\nFull log: {log}"
    )


def _log_file() -> Path:
    logs = cache.make(cache.folder() / "logs")
    for old in sorted(logs.glob("build-*.log"))[: 1 - _LOGS_KEPT]:
        old.unlink(missing_ok=True)
    return logs / f"build-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


@contextmanager
def _scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hvdkit-build-"))  # noqa: TID251
    try:
        if reason := cache.untrusted(path):
            raise HvdkitError(
                f"the engine cannot be built in {path.parent}, because {reason}: others could "
                "replace the files of the build. Set TMPDIR to a folder of your own."
            )
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
