"""Probes of an optimizer in PyTorch, each in a job of its own, and their tables.

`scripts/bench_costs` describes the probes.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from hvdkit.bench.figures import new_table, wide_console
from hvdkit.bench.jobs import Job, JobPlan
from hvdkit.bench.places import ThisMachine
from hvdkit.bench.software import FLAT, STOCK, Software, choose
from hvdkit.bench.step import variants
from hvdkit.bench.step.variants import HVDKIT, TORCH, Variant
from hvdkit.bench.worker import Workload
from hvdkit.system.owned_folders import TemporaryFolder

PROBES = ("python-cost", "memory", "checks")

# The steps and the parameters of `python-cost`.
_STEPS = 2000
_PARAMETERS = 1000
# The calls of each check of `checks`.
_CHECKS = 30

# With this setting, malloc returns freed memory to the system at once. Otherwise an allocation
# could reuse freed memory, and the peak would not show it.
_MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def measure(probe: str, names: str | None, stock: Path | None) -> None:
    """Run the probe of each variant, each in a job of its own, and print the answers.

    Args:
        probe: one of `PROBES`.
        names: the variants, as `--variants` of `hvdkit bench step`; None: those by default.
        stock: the folder of another Horovod.
    """
    software = Software(TORCH, {STOCK: stock})
    known = [each for each in variants.known(TORCH) if each.controller == "gloo"]
    if probe == "checks":
        known = [each for each in known if each.optimizer in HVDKIT]
    chosen, left_out = choose(
        known, names, variants.by_default, lambda each: software.lacks(each.needs, ("gloo",))
    )
    for text in left_out:
        print(f"# {text}")
    answers = {}
    for variant in chosen:
        for size in (1, 2) if probe == "python-cost" else (2,):
            print(f"{probe}: {variant.name}, ranks: {size}", file=sys.stderr, flush=True)
            answers[f"{variant.name}, {size}"] = _answer(variant, probe, size, software)
    show(probe, answers, wide_console())


def _answer(variant: Variant, probe: str, size: int, software: Software) -> dict[str, Any]:
    """Return the answer with the highest cost: in training, all ranks wait for the slowest."""
    plan = JobPlan(
        name=variant.name,
        module="benchmarks.costs",
        controller="gloo",
        size=size,
        spec={"variant": dataclasses.astuple(variant), "bucket_bytes": None},
        engine=software.engine(variant.needs),
        env=(_MEMORY_ENVIRONMENT if probe == "memory" else {})
        | ({"HVDKIT_COLLECTIVES": "flat"} if variant.optimizer == FLAT else {}),
    )
    with TemporaryFolder("hvdkit-bench-") as folder:
        job = Job(plan, ThisMachine(size=size), Path(folder))
        try:
            job.start()
            with job.turn():
                found = max(job.ask(probe), key=lambda answer: float(answer["cost"]))
            job.finish()
        finally:
            job.close()
    return found


def show(probe: str, answers: Mapping[str, Mapping[str, float]], console: Console) -> None:
    """Print the table of a probe. `answers` is: variant and ranks -> answer of the slowest rank."""
    shows = {"python-cost": _show_python_cost, "memory": _show_memory, "checks": _show_checks}
    shows[probe](answers, console)


def _show_python_cost(answers: Mapping[str, Mapping[str, float]], console: Console) -> None:
    title = f"{_PARAMETERS} parameters of 2 elements: what synchronization adds"
    columns = ("CPU us / parameter", "wall us / parameter", "memory grew by, bytes")
    table = new_table(title, ("variant, ranks", *columns))
    for name, answer in answers.items():
        cells = [f"{answer['cost']:.2f}", f"{answer['wall']:.2f}", f"{answer['grown']:.0f}"]
        table.add_row(name, *cells)
    console.print(table)
    steps = next(iter(answers.values()))["steps"]
    console.print(
        f"The difference of two medians of {steps:.0f} steps: backward passes with and without "
        "synchronization, in turns, in the same process. CPU time is that of the calling thread, "
        "without other threads and without waits that sleep. With one rank an optimizer may do "
        "nothing. Memory is the growth of resident memory during these steps."
    )


def _show_memory(answers: Mapping[str, Mapping[str, float]], console: Console) -> None:
    title = "resnet50, 2 ranks: peak of resident memory while training, MB"
    table = new_table(title, ("variant, ranks", "without", "with", "more", "more / gradients"))
    for name, answer in answers.items():
        more = answer["cost"]
        cells = [f"{answer[key] / 1e6:.1f}" for key in ("without", "with", "cost")]
        table.add_row(name, *cells, f"{more / answer['bytes']:.2f}")
    console.print(table)
    console.print(
        "In one process, after hvd.init(): steps of the plain optimizer, then of the variant. The "
        "peak is VmHWM of /proc/self/status over 3 steps, after 3 unmeasured ones and a reset "
        "through /proc/self/clear_refs. The difference includes the engine's own buffers."
    )


def _show_checks(answers: Mapping[str, Mapping[str, float]], console: Console) -> None:
    title = "resnet50 with Adam, 2 ranks: hvdkit's checks, median ms"
    columns = ("comparison of ranks", "check for NaN", "small allreduce")
    table = new_table(title, ("variant, ranks", *columns))
    for name, answer in answers.items():
        cells = [f"{1e3 * answer[key]:.2f}" for key in ("compare", "nonfinite", "cost")]
        table.add_row(name, *cells)
    console.print(table)
    console.print(
        f"Medians of {_CHECKS} calls. The comparison is that of check_interval, the check for NaN "
        "that of on_nonfinite. The allreduce sums 16 bytes, as maybe_save does."
    )


# --- the ranks ----------------------------------------------------------------------------------


def build(spec: Mapping[str, Any]) -> Workload:
    """Return the work of this rank."""
    return Probe(spec)


class Probe:
    """A `worker.Workload`: one probe."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from hvdkit.bench.step.torch_rank import Framework

        self._framework = Framework(spec)

    def facts(self) -> dict[str, Any]:
        """Return no facts: the runner needs none."""
        return {}

    def answer(self, command: str, message: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Run the probe of this name."""
        if command == "checks":
            return _checks()
        if command == "memory":
            return _memory(self._framework)
        return _python_cost(self._framework, _STEPS)

    def close(self) -> None:
        """Leave the job."""
        self._framework.close()


def _python_cost(framework: Any, steps: int) -> dict[str, Any]:
    """Return the cost of the wrapped optimizer per parameter, in microseconds."""
    import torch

    from hvdkit.bench.step.torch_rank import plain_loop

    class Many(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            each = (torch.nn.Parameter(torch.ones(2)) for _ in range(_PARAMETERS))
            self.all = torch.nn.ParameterList(each)

        def forward(self) -> torch.Tensor:
            return torch.cat(list(self.all)).sum()

    def side(wrap: bool) -> Callable[[], tuple[float, float]]:
        model = Many()
        plain = torch.optim.SGD(model.parameters(), lr=1e-3)
        wrapped = framework.wrap(model, plain) if wrap else plain_loop(model, plain)

        def step() -> tuple[float, float]:
            loss = wrapped.module()
            began, cpu_began = time.perf_counter(), time.thread_time()
            wrapped.backward(loss, True)
            times = time.perf_counter() - began, time.thread_time() - cpu_began
            with wrapped.updating():
                wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()
            return times

        return step

    plain_step, wrapped_step = side(wrap=False), side(wrap=True)
    for _ in range(max(20, steps // 4)):
        plain_step()
        wrapped_step()
    process = psutil.Process()
    # Allocate the lists now, because the growth of memory is measured, too.
    times = [[0.0] * steps for _ in range(4)]
    before = process.memory_info().rss
    for i in range(steps):
        times[0][i], times[1][i] = plain_step()
        times[2][i], times[3][i] = wrapped_step()
    grown = process.memory_info().rss - before
    wall, cpu, wrapped_wall, wrapped_cpu = map(statistics.median, times)
    scale = 1e6 / _PARAMETERS
    cost, more = (wrapped_cpu - cpu) * scale, (wrapped_wall - wall) * scale
    return {"cost": cost, "wall": more, "grown": grown, "steps": steps}


def _checks() -> dict[str, Any]:
    """Return the median seconds of the comparison of ranks, the check for NaN and an allreduce."""
    import torch

    import hvdkit.torch as hvd
    from hvdkit.bench.step.torch_models import image_loss, resnet50
    from hvdkit.torch.reduction.nonfinite import NonFiniteNames
    from hvdkit.torch.wrapped_optimizer import wrapped

    torch.manual_seed(0)
    model = resnet50()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters()
    )
    image_loss(1)(model).backward()
    optimizer.step()
    gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    replicas, found, word = wrapped(optimizer).replicas, NonFiniteNames(), torch.zeros(4)
    assert replicas is not None

    def search() -> None:
        for name, gradient in gradients:
            found.add(name, gradient)
        found.names()

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(_CHECKS):
            hvd.barrier()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return {
        "compare": median(lambda: replicas.compare(1)),
        "nonfinite": median(search),
        "cost": median(lambda: hvd.allreduce(word, name="word", op=hvd.Sum)),
    }


def _memory(framework: Any) -> dict[str, Any]:
    """Return by how many bytes synchronization increases the peak of memory."""
    import torch

    from hvdkit.bench.step.torch_models import image_loss, resnet50
    from hvdkit.bench.step.torch_rank import Wrapped, plain_loop

    torch.manual_seed(0)
    model = resnet50()
    loss_of = image_loss(1)
    plain = torch.optim.SGD(model.parameters(), lr=1e-5)

    def peak(wrapped: Wrapped) -> int:
        for i in range(6):
            if i == 3:
                Path("/proc/self/clear_refs").write_text("5")
            wrapped.backward(loss_of(wrapped.module), True)
            with wrapped.updating():
                wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()
        status = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    without = peak(plain_loop(model, plain))
    with_it = peak(framework.wrap(model, plain))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"cost": with_it - without, "without": without, "with": with_it, "bytes": size}
