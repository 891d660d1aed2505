"""The part `doctor`: the output of `hvdkit doctor` in both environments."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_checks.jobs import Clock
from gpu_checks.part import REPOSITORY, Setting, main
from gpu_checks.report import Report


def run(setting: Setting, report: Report) -> None:
    """Run doctor with and without --json, keep its output, and check that it names the GPU."""
    clock = Clock(setting.seconds, spare=3)
    needed = 0.0
    # One form after the other, because each doctor loads the frameworks several times.
    for form in ("--json",), ():
        left = clock.left()
        if left < needed:
            why = f"no time left: {left:.0f} s of the {needed:.0f} s that doctor --json took"
            report.add(" ".join(("doctor", *form)), "skipped", why)
            continue
        _doctors(setting, report, clock, form)
        needed = left - clock.left()


def _doctors(setting: Setting, report: Report, clock: Clock, form: Sequence[str]) -> None:
    """Run doctor in all environments at the same time."""
    running = {
        engine: subprocess.Popen(
            [python, "-m", "hvdkit", "doctor", *form],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
        )
        for engine, python in _environments(setting).items()
    }
    try:
        for engine, process in running.items():
            name = " ".join(("doctor", *form)) + f", environment {engine}"
            with report.check(name) as values:
                output, _ = process.communicate(timeout=clock.left())
                values |= {"exit_status": process.returncode, "output": output.splitlines()}
                if process.returncode not in (0, 1):
                    raise ValueError(f"exit status {process.returncode}: expected 0 or 1")
                if absent := missing(output, expected(setting, engine)):
                    raise ValueError(f"the output does not name {', '.join(absent)}")
                if form:
                    values["output"] = parsed(output)
                    values["detail"] = json_detail(values["output"], process.returncode)
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def _environments(setting: Setting) -> dict[str, str]:
    """Return engine -> interpreter, each interpreter once: a dry run has only one."""
    engines = {python: engine for engine, python in setting.pythons.items()}
    return {engine: python for python, engine in engines.items()}


def parsed(output: str) -> dict[str, Any]:
    """Return the JSON object in the output; warnings of the frameworks may come before it."""
    return json.loads(output[output.index("{\n") :])


def json_detail(content: Mapping[str, Any], exit_status: int) -> str:
    """Return one line about the JSON object.

    Raises:
        ValueError: the exit status does not fit the content.
    """
    errors, warnings = named(content, "error"), named(content, "warning")
    if exit_status != int(bool(errors)):
        raise ValueError(
            f"exit status {exit_status} with {len(errors)} errors: expected 1 with errors, else 0"
        )
    return f"errors: {', '.join(errors) or 'none'}; warnings: {', '.join(warnings) or 'none'}"


def named(content: Mapping[str, Any], status: str) -> list[str]:
    """Return the names of the entries of a doctor's JSON that have `status`."""
    (entries,) = (value for value in content.values() if isinstance(value, list))
    return [entry["name"] for entry in entries if entry["status"] == status]


def expected(setting: Setting, engine: str) -> list[str]:
    """Return regular expressions for what the output must name."""
    if setting.dry:
        return ["PyTorch|torch", "Horovod"]
    found = [
        re.escape(setting.machine["GPU"]),
        re.escape(f"CUDA {setting.machine['CUDA of torch']}"),
    ]
    return [*found, r"NCCL \d"] if engine == "nccl" else found


def missing(output: str, patterns: Sequence[str]) -> list[str]:
    """Return the patterns that do not occur in the output, however its lines are broken."""
    flat = " ".join(output.split())
    return [pattern for pattern in patterns if not re.search(pattern, flat)]


if __name__ == "__main__":
    main("doctor", run)
