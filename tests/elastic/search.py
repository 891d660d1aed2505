"""Draw elastic jobs and disturbances, run them, and compare what they train with the guide.

python -m tests.elastic.search --minutes 10 [--framework torch] [--launcher horovodrun]
                               [--seed N --jobs 1 --verbose]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.elastic import preloaded
from tests.elastic.jobs import HOROVODRUN, HVDKIT, ElasticJob
from tests.ranks.rank_pool import REPOSITORY

#: More than the number of times that a sample is trained in an epoch.
BASE = 16
FRAMEWORKS = ("torch", "keras-torch", "keras-tensorflow", "tensorflow")
#: With custom loops: those that Horovod's launcher runs too.
IN_PROCESS_FRAMEWORKS = ("torch", "tensorflow")
_MODULES = {
    "torch": ["hvdkit.torch", "hvdkit.checkpoint"],
    "keras-torch": ["keras", "hvdkit.keras"],
    "keras-tensorflow": ["keras", "hvdkit.keras"],
    "tensorflow": ["keras", "hvdkit.tensorflow"],
}
LAUNCHERS = {"hvdkit": HVDKIT, "horovodrun": HOROVODRUN}
_OPTIONS = {
    "hvdkit": ("--min-np", "1", "--max-np", "3", "--restarts", "8"),
    "horovodrun": ("-np", "2", "--min-np", "1", "--max-np", "3"),
}
_HOSTS = ("localhost:1", "localhost:2", "localhost:3", "localhost:1,127.0.0.1:1")
#: For a job of Horovod's launcher that loses a rank: it never uses the host of this rank again.
_TWO_HOSTS = ("localhost:1,127.0.0.1:1", "localhost:2,127.0.0.1:1")
_SCRIPT = Path(__file__).with_name("drawn_job.py")
#: Disturbances that end the whole job, and its exit statuses then: a stop with a checkpoint, and
#: signals.
_ENDS = ("stop", "stop", "terminate", "launcher")
_ENDED = (75, 128 + signal.SIGTERM, 128 + signal.SIGUSR1, -signal.SIGKILL, -signal.SIGTERM)


def draw_job(draw: random.Random, framework: str, launcher: str = "hvdkit") -> dict[str, Any]:
    """Return a job and its disturbances."""
    kind = framework.partition("-")[0]
    job: dict[str, Any] = {
        "kind": kind,
        "framework": framework,
        "launcher": launcher,
        "base": BASE,
        "samples": draw.randint(8, 26),
        "batch": draw.randint(1, 4),
        "epochs": draw.randint(1, 4),
        "fits": 1,
        "hosts": draw.choice(_HOSTS[1:]),
        "commit": draw.choice([1, 1, 2, 3, 100]),
        "checks": draw.random() < 0.5,
        "shuffle": draw.random() < 0.7,
        "checkpoint": draw.choice([0, 0, 1, 3, 100]),
        "asynchronous": draw.random() < 0.5,
        "sampler": draw.choice(["elastic", "resumable"]),
        "state": draw.choice(["keras", "variables"]),
        "window": draw.choice([1, 1, 2, 3]),
    }
    if kind == "keras":
        _draw_fit(draw, job)
    if launcher == "horovodrun":
        # Checkpoints and accumulated gradients do not survive a reset: see the guide.
        job |= {"checkpoint": 0, "window": 1, "wraps": True}
        _draw_in_process(draw, job)
    else:
        job["disturbances"] = _draw_disturbances(draw, job)
        _draw_ends(draw, job)
    return job


def _draw_fit(draw: random.Random, job: dict[str, Any]) -> None:
    style = draw.choice(["remaining", "remaining", "initial", "initial", "checkpoint"])
    if style == "checkpoint":
        job["checkpoint"] = job["checkpoint"] or 2
    order = [0, 1, 2, 3]
    draw.shuffle(order)
    job |= {
        "style": style,
        "order": order,
        "fits": draw.choice([1, 1, 2]),
        "epochs": min(job["epochs"], 2) if job["fits"] == 2 else job["epochs"],
        "data": draw.choice(["arrays", "dataset", "pydataset", "unknown", "sampler", "sampler"]),
        "update_batch": style != "checkpoint" and draw.random() < 0.6,
        "rates": "scheduler" if style == "initial" and draw.random() < 0.5 else "callback",
        "validation": draw.random() < 0.3,
        "commits_fits": draw.random() < 0.5,
        "steps_per_execution": 1 if job["framework"] == "keras-torch" else draw.choice([1, 1, 2]),
    }
    job["epochs"] = min(job["epochs"], 4 // job["fits"])


def _points(job: dict[str, Any]) -> int:
    steps = -(-job["samples"] // (2 * job["batch"])) * job["epochs"] * job["fits"]
    return 10 + 5 * steps


def _draw_disturbances(draw: random.Random, job: dict[str, Any]) -> list[dict[str, Any]]:
    changes_hosts = draw.random() < 0.5
    points = _points(job)
    actions = ["kill", "kill", "kill", "internal", "interrupt", "error"]
    drawn = []
    # A point of the first third of a start is more probable: later starts have less to do.
    for start in range(draw.randint(1, 4)):
        for _ in range(draw.choice([1, 1, 2])):
            each = {
                "start": start,
                "point": 1 + int(draw.random() ** 1.5 * points),
                "rank": draw.randrange(2),
                "action": draw.choice(actions),
            }
            if changes_hosts and draw.random() < 0.6:
                hosts, wait = draw.choice(_HOSTS), draw.choice([0.0, 1.3, 1.3])
                each |= {"action": "hosts", "hosts": hosts, "wait": wait}
            drawn.append(each)
    return drawn


def _draw_ends(draw: random.Random, job: dict[str, Any]) -> None:
    """Draw ends of the job, after which it is launched again, and a lost agent or a full disk."""
    job |= {"memory": draw.choice([0, 0, 1, 2]), "archive": draw.random() < 0.4}
    actions = [draw.choice(_ENDS) for _ in range(draw.choice([0, 1, 1, 2]))]
    for launch, action in enumerate([*actions, *draw.choice([[], [], ["full"], ["agent"]])]):
        each = {
            "launch": launch,
            "start": draw.choice([0, 0, 1]),
            "point": 1 + int(draw.random() ** 1.5 * _points(job)),
            "rank": draw.randrange(2),
            "action": action,
        }
        job["disturbances"].append(each)
    job["wraps"] = draw.random() < 0.7


def _draw_in_process(draw: random.Random, job: dict[str, Any]) -> None:
    """Draw hosts and disturbances of a job of Horovod's launcher."""
    ending = draw.choice(["kill", "error", None])
    choices = _TWO_HOSTS if ending else (*_HOSTS, _TWO_HOSTS[1])
    job["hosts"] = draw.choice([hosts for hosts in choices if hosts != "localhost:1"])
    job["disturbances"] = drawn = []
    starts = draw.randint(1, 5)
    ending_start = draw.randrange(starts) if ending else None
    earlier, removed = [job["hosts"]], False
    for start in range(starts):
        actions = [draw.choice(["internal", "interrupt", "hosts", "hosts"])]
        actions += draw.choice([[], [], ["internal"]])
        actions += [ending] if start == ending_start else []
        for action in actions:
            each = {
                "start": start,
                "point": 1 + int(draw.random() ** 2 * _points(job) / starts),
                "rank": draw.randrange(2),
                "action": action,
            }
            if action == "hosts":
                hosts = draw.choice([other for other in choices if other != earlier[-1]])
                # Horovod takes the end of a removed rank for that of its successor.
                waits = removed and any(_adds(hosts, other) for other in earlier)
                each |= {"hosts": hosts, "before": 12.0 if waits else 0.0}
                each["wait"] = draw.choice([0.0, 2.5, 2.5])
                removed = removed or _adds(earlier[-1], hosts)
                earlier.append(hosts)
                if not removed and draw.random() < 0.5:
                    # While Horovod starts again with these hosts.
                    each["then"] = draw.choice([other for other in choices if other != hosts])
            drawn.append(each)
            if "then" in each:
                return  # A later reset would hide that these hosts were not noticed.


def _slots(hosts: str) -> dict[str, int]:
    return {host: int(number) for host, _, number in (h.partition(":") for h in hosts.split(","))}


def _adds(hosts: str, other: str) -> bool:
    """Return whether a host has more slots than in another list of hosts."""
    before = _slots(other)
    return any(slots > before.get(host, 0) for host, slots in _slots(hosts).items())


class Problem(AssertionError):
    """The difference between what a job did and what the guide says."""


def check(
    job: dict[str, Any], folder: Path, text: str, status: int, wanted: Any = None
) -> list[list[float]]:
    """Compare a finished job with the guide, and return its weights.

    Args:
        job: the job.
        folder: the folder with the results.
        text: what the job printed.
        status: its exit status.
        wanted: the weights of an undisturbed job, if known.

    Raises:
        Problem: they differ.
    """
    if status:
        raise Problem(f"status {status}")
    found = [json.loads(path.read_text()) for path in folder.glob("result-*.json")]
    last = max((each["start"] for each in found), default=-1)
    results = [each for each in found if each["start"] == last]
    if not results or len(results) != results[0]["size"]:
        raise Problem(f"{len(results)} results")
    first = results[0]
    for each in results:
        if each["weights"] != first["weights"] or each["seen"] != first["seen"]:
            raise Problem("the ranks differ")
        _check_resets(job, each)
        if any(each.get(name) != first.get(name) for name in ("rate", "step", "iterations")):
            raise Problem("the ranks differ in their rates or steps")
        if job["kind"] == "tensorflow" and each["iterations"] != each["step"]:
            raise Problem(f"{each['iterations']} iterations in {each['step']} steps")
        if job["kind"] == "torch" and each["rate"] != BASE ** -job["epochs"]:
            raise Problem(f"the rate is {each['rate']}")
    if job["launcher"] == "horovodrun" and not _loses_ranks(job):
        # The scripts wait for the last change of hosts before their last commit.
        hosts = (folder / "hosts.txt").read_text().strip().replace("\n", ",")
        if first["size"] != min(3, sum(_slots(hosts).values())):
            raise Problem(f"{first['size']} ranks at the end on {hosts}")
    sizes = {int(n) for n in re.findall(r"begin on (\d) ranks", text)}
    counting = [row[0] for row in first["weights"][:-1]]
    _check_counts(job, counting, sizes)
    if len(sizes) == 1:
        _check_seen(job, first["seen"], sizes.pop())
        if wanted is not None and is_exact(job) and first["weights"] != wanted:
            difference = np.abs(np.array(first["weights"]) - wanted).max()
            raise Problem(f"the weights differ from an undisturbed run by {difference:g}")
    return first["weights"]


def _loses_ranks(job: dict[str, Any]) -> bool:
    return any(each["action"] in ("kill", "error") for each in job["disturbances"])


def _check_resets(job: dict[str, Any], result: dict[str, Any]) -> None:
    resets, size = result["resets"], result["size"]
    if job["launcher"] == "hvdkit":
        good = resets == [size] * (result["start"] > 0)
    elif result["first"] == result["start"]:
        good = not resets
    else:
        good = resets[-1:] == [size]
    if not good:
        raise Problem(f"resets {resets}")


def is_exact(job: dict[str, Any]) -> bool:
    """Return whether each sample is trained exactly once (except to fill the last batch)."""
    if job["kind"] != "keras" or job["update_batch"] or job["checkpoint"]:
        return True
    return job["commit"] == 100


def _keeps_position(job: dict[str, Any]) -> bool:
    """Return whether a new number of ranks continues at the same sample."""
    if job["kind"] == "torch":
        return True
    if job["kind"] == "tensorflow":
        return job["sampler"] == "resumable"
    return job["data"] == "sampler" and bool(job["checkpoint"])


def _check_counts(job: dict[str, Any], weights: list[float], sizes: set[int]) -> None:
    epochs = job["epochs"] * job["fits"]
    counts = []
    for weight in weights:
        scaled = round(-weight * BASE ** (epochs - 1))
        if scaled != -weight * BASE ** (epochs - 1) or scaled < 0:
            raise Problem(f"a weight is {weight}")
        digits = [scaled // BASE ** (epochs - 1 - e) % BASE for e in range(epochs)]
        digits[0] = scaled // BASE ** (epochs - 1)
        counts.append(digits)
    most = max(sizes) - 1
    for epoch in range(epochs):
        numbers = [digits[epoch] for digits in counts]
        if min(numbers) < 1 and (len(sizes) == 1 or job["kind"] != "tensorflow"):
            raise Problem(f"epoch {epoch}: samples were not trained: {numbers}")
        if min(numbers) < 1 and job["sampler"] == "resumable":
            raise Problem(f"epoch {epoch}: samples were not trained: {numbers}")
        exact = is_exact(job) and (len(sizes) == 1 or _keeps_position(job))
        if exact and sum(numbers) - len(numbers) > most:
            raise Problem(f"epoch {epoch}: samples were repeated: {numbers}")


def _check_seen(job: dict[str, Any], seen: list[list[int]], size: int) -> None:
    batches = math.ceil(math.ceil(job["samples"] / size) / job["batch"])
    wanted = []
    for fit in range(job["fits"]):
        for epoch in range(job["epochs"]):
            step = job.get("steps_per_execution", 1)
            numbers = [*range(step - 1, batches, step)]
            if numbers[-1:] != [batches - 1] and step > 1:
                numbers.append(numbers[-1] + step if numbers else step - 1)
            wanted += [[fit, epoch, number] for number in numbers]
            if job["kind"] == "keras":
                wanted.append([fit, epoch, -1])
    if step_differs := job.get("steps_per_execution", 1) > 1:
        seen = [each for each in seen if each[2] == -1]
        wanted = [each for each in wanted if each[2] == -1]
    exact = is_exact(job) or step_differs
    if not exact:
        seen = sorted({tuple(each) for each in seen})
        wanted = sorted({tuple(each) for each in wanted})
    if seen != wanted:
        raise Problem(f"callbacks saw {seen}, and not {wanted}")


@contextlib.contextmanager
def preloaded_framework(framework: str, folder: Path) -> Iterator[dict[str, str]]:
    """Run a process from which ranks are forked. Yields variables for the jobs."""
    address = folder / "socket"
    variables = {
        "KERAS_BACKEND": framework.removeprefix("keras-"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    program = f"serve({str(address)!r}, {_MODULES[framework]!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.elastic.preloaded import serve; {program}"],
        env=os.environ | variables,
    )
    try:
        deadline = time.monotonic() + 90
        while not address.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield variables | {preloaded.ADDRESS: str(address)}
    finally:
        process.kill()
        process.wait()


def run_job(job: dict[str, Any], folder: Path, variables: dict[str, str]) -> str:
    """Run a job, and without a change of hosts an undisturbed job before it.

    Returns:
        What the job printed.

    Raises:
        Problem: the job did not do what the guide says.
    """
    wanted = None
    if is_exact(job) and not any(each["action"] == "hosts" for each in job["disturbances"]):
        (folder / "undisturbed").mkdir()
        undisturbed = {**job, "disturbances": []}
        _, wanted = _run(undisturbed, folder / "undisturbed", variables, None)
    return _run(job, folder, variables, wanted)[0]


def _run(
    job: dict[str, Any], folder: Path, variables: dict[str, str], wanted: Any
) -> tuple[str, list[list[float]]]:
    text, status, launch = "", _ENDED[0], 0
    while status in _ENDED:
        (folder / "job.json").write_text(json.dumps({**job, "launch": launch}))
        for path in folder.glob("result-*.json"):
            path.unlink()
        try:
            told, status = _launch(job, folder, variables)
        except AssertionError as error:
            raise Problem(f"{error}\n{text}") from None
        text += f"{told}\nlaunch {launch}: status {status}\n"
        ends = [e for e in job["disturbances"] if e.get("launch", 0) == launch]
        if not any(each["action"] in _ENDS for each in ends):
            break
        launch += 1
    try:
        return text, check(job, folder, text, status, wanted)
    except Problem as problem:
        raise Problem(f"{problem}\n{text}") from None


def _launch(job: dict[str, Any], folder: Path, variables: dict[str, str]) -> tuple[str, int]:
    """Run the job until its launcher and all ranks have ended. Return its text and its status."""
    command = [sys.executable, "-IS", preloaded.__file__, str(_SCRIPT)]
    launcher, options = LAUNCHERS[job["launcher"]], _OPTIONS[job["launcher"]]
    with ElasticJob(
        folder, job["hosts"], *options, env=variables, command=command, launcher=launcher
    ) as running:
        (folder / "launcher").write_text(str(running.process.pid))
        status = running.finish(120)
    deadline = time.monotonic() + 30
    while any(_works_in(process, folder) for process in psutil.process_iter()):
        assert time.monotonic() < deadline, f"processes are left:\n{running.text}"
        time.sleep(0.05)
    return running.text, status


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main() -> None:
    """Search until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append")
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--verbose", action="store_true", help="print what the jobs print")
    parser.add_argument("--keep", type=Path, help="write the output of failed jobs here")
    options = parser.parse_args()
    launchers = options.launcher or list(LAUNCHERS)
    jobs = [
        (framework, launcher)
        for launcher in launchers
        for framework in options.framework or FRAMEWORKS
        if launcher == "hvdkit" or framework in IN_PROCESS_FRAMEWORKS
    ]
    deadline = time.monotonic() + options.minutes * 60
    results: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        variables = {}
        for framework in dict(jobs):
            (root / framework).mkdir()
            context = preloaded_framework(framework, root / framework)
            variables[framework] = stack.enter_context(context)
        for number in range(options.jobs):
            if time.monotonic() > deadline:
                break
            seed = options.seed + number
            framework, launcher = jobs[number % len(jobs)]
            folder = root / f"job-{seed}"
            folder.mkdir()
            job = draw_job(random.Random(seed), framework, launcher)
            began = time.monotonic()
            try:
                text, result = run_job(job, folder, variables[framework]), "good"
            except Problem as problem:
                text, result = str(problem), "FAILED"
            results[f"{launcher} {framework} {result}"] += 1
            taken = time.monotonic() - began
            disturbed = text.count("disturbed ")
            print(
                f"{seed} {launcher} {framework} {result} {taken:.1f} s, {disturbed} disturbances",
                flush=True,
            )
            if result == "FAILED" or options.verbose:
                print(json.dumps(job))
                print(text if options.verbose else text.partition("\n")[0], flush=True)
                errors = {
                    e for e in re.findall(r"\w*(?:Error|Exception).*", text) if "drawn" not in e
                }
                print(*sorted(errors), sep="\n", flush=True)
                if options.keep:
                    options.keep.mkdir(exist_ok=True)
                    (options.keep / f"{framework}-{seed}.txt").write_text(f"{job}\n{text}")
    print(dict(results))
    sys.exit(any("FAILED" in name for name in results))


if __name__ == "__main__":
    main()
