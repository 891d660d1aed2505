"""The command line of `scripts/check_gpu`: which parts run, with what, and for how long."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_checks import build, pack
from gpu_checks.part import REPOSITORY, Setting
from gpu_checks.report import Report, read, write_summary

#: Part -> the seconds that it may take. Together 20 minutes.
PARTS = {
    "build": 330,
    "doctor": 60,
    "collectives": 120,
    "synchronizer": 240,
    "keras": 60,
    "checkpoint": 60,
    "faults": 150,
    "speed": 180,
}

#: In a dry run, which may share a small machine with other work, parts take longer.
_DRY_FACTOR = 3

FOLDER = ".check_gpu"

_EPILOG = """examples:
  scripts/check_gpu pack                  where there is a network: fill .check_gpu/pack
  scripts/check_gpu all                   on the GPU machine: every part that is not done yet
  scripts/check_gpu speed                 one part, again
  scripts/check_gpu all --dry-run         without a GPU: the same code on the CPU, small sizes

Copy .check_gpu/pack to a machine without a network. It holds the engines once they are built, so
copy it back as well. .check_gpu/results has a JSON file per part, and the summary gpu.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 (a check failed) or 2 (wrong arguments, nothing to run on)."""
    parser = argparse.ArgumentParser(
        prog="check_gpu",
        description="Check and measure hvdkit on one NVIDIA GPU: 20 minutes, no network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=["pack", *PARTS, "all"])
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / FOLDER,
        metavar="DIR",
        help=f"where pack, work and results are (default: {FOLDER} in the checkout)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run on the CPU with this Python's engine; build is left out",
    )
    parser.add_argument(
        "--python-version",
        default="3.12",
        metavar="X.Y",
        help="of the GPU machine, for pack (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    options.folder = options.folder.absolute()
    # A signal ends the running part too: see _run.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if options.part == "pack":
            return pack.run(options.folder / "pack", options.python_version)
        return _check(options)
    except pack.Problem as problem:
        print(f"check_gpu: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("check_gpu: interrupted; the results until here are kept", file=sys.stderr)
        return 130


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _check(options: argparse.Namespace) -> int:
    results = options.folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    facts = machine(options.dry_run)
    failed = False
    for part in PARTS if options.part == "all" else (options.part,):
        if options.dry_run and part == "build":
            if options.part == "build":
                raise pack.Problem("build has no dry run: it needs nvcc, PyTorch with CUDA, a pack")
            continue
        if options.part == "all" and _done(part, options.folder, facts):
            print(f"== {part}: done before; `check_gpu {part}` repeats it", flush=True)
            failed |= _has_failed(results / f"{part}.json")
            continue
        print(f"== {part}, at most {_seconds(part, options)} s", flush=True)
        failed |= _run(part, options, facts) != 0
        write_summary(results, tuple(PARTS))
    print(f"== results: {write_summary(results, tuple(PARTS))}")
    return 1 if failed else 0


def _seconds(part: str, options: argparse.Namespace) -> int:
    return PARTS[part] * (_DRY_FACTOR if options.dry_run else 1)


def _has_failed(path: Path) -> bool:
    content = read(path)
    return any(check["outcome"] == "failed" for check in (content or {}).get("checks", ()))


def _done(part: str, folder: Path, facts: Mapping[str, Any]) -> bool:
    if part == "build" and not build.ready(folder):
        # The results were copied from another machine, without its environments.
        return False
    content = read(folder / "results" / f"{part}.json")
    return bool(content and content["finished"] and content["machine"] == facts)


def _run(part: str, options: argparse.Namespace, facts: Mapping[str, Any]) -> int:
    """Run one part in a process group of its own, and end the group after its time."""
    results = options.folder / "results"
    if part == "build":
        return build.run(options.folder, Report(results, part, facts), PARTS[part])
    pythons = dict.fromkeys(build.ENGINES, sys.executable)
    if not options.dry_run:
        pythons = build.pythons(options.folder)
    seconds = _seconds(part, options)
    setting = Setting(
        "cpu" if options.dry_run else "cuda", str(options.folder), seconds, pythons, facts
    )
    # The part opens the report again. This report stays if the part cannot start.
    report = Report(results, part, facts)
    # A part can run with either engine. Its checks of a missing engine fail.
    python = pythons.get("staged") or next(iter(pythons.values()))
    process = subprocess.Popen(
        [python, "-m", f"gpu_checks.{part}", setting.to_json()],
        cwd=REPOSITORY,
        env=environment(os.environ),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + seconds
    try:
        status = process.wait(seconds)
        ending = f"ended with exit status {status} before it was finished"
    except subprocess.TimeoutExpired:
        status, ending = 1, f"did not end within {seconds} s"
    finally:
        _end(process, deadline)
    _say_unfinished(report.path, ending)
    return status


def _end(process: subprocess.Popen[bytes], deadline: float) -> None:
    """End whatever is left of a part's process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(10 if time.monotonic() < deadline + 10 else 1)
        except subprocess.TimeoutExpired:
            continue


def _say_unfinished(path: Path, ending: str) -> None:
    """Add a failed check to the report of a part that has not finished."""
    content = read(path)
    if content is None or content["finished"]:
        return
    failure = {"name": "the part", "outcome": "failed", "detail": ending, "values": {}}
    content["checks"].append(failure)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
    print(f"- failed: the part: {ending}", flush=True)


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of parts and ranks, which import modules from this checkout."""
    path = [
        str(REPOSITORY),
        str(REPOSITORY / "scripts"),
        *filter(None, [inherited.get("PYTHONPATH")]),
    ]
    return {
        **{k: v for k, v in inherited.items() if not k.startswith(("HOROVOD_", "HVDKIT_"))},
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        # The user copies the folder between machines. Bytecode would only enlarge it.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


_TORCH_FACTS = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "CUDA of torch": torch.version.cuda,
    "GPU": torch.cuda.get_device_name(0) if cuda else None,
    "GPUs": torch.cuda.device_count(),
    "GPU memory, bytes": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
    "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
}))
"""


def machine(dry_run: bool) -> dict[str, Any]:
    """Return facts about this machine: the software, and the GPU unless this is a dry run.

    Raises:
        Problem: this Python has no PyTorch, or PyTorch sees no GPU.
    """
    facts: dict[str, Any] = {
        "commit": _output(["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]),
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "cores": len(os.sched_getaffinity(0)),
    }
    answer = _output([sys.executable, "-c", _TORCH_FACTS])
    if answer is None:
        raise pack.Problem(
            f"{sys.executable} has no PyTorch that loads. Run this script with the Python that has "
            f"one: python3 scripts/check_gpu"
        )
    facts |= json.loads(answer.splitlines()[-1])
    if not dry_run:
        if not facts["GPU"]:
            raise pack.Problem(
                f"PyTorch {facts['torch']} sees no GPU here. Without one: check_gpu all --dry-run"
            )
        facts["driver"] = _output(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
        facts["nvcc"] = (_output(["nvcc", "--version"]) or "not found").splitlines()[-1]
    return facts


def _output(command: Sequence[str]) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
