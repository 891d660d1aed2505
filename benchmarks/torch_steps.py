"""One backward pass with gradient synchronisation, in PyTorch. See `scripts/bench_sync`."""

import argparse
import contextlib
import importlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.table import Table

from benchmarks.jobs import REPOSITORY, Job
from benchmarks.report import console
from benchmarks.runner import measure, run_command, save
from benchmarks.torch_models import image_loss, resnet50, text_loss, transformer
from benchmarks.variants import BACKWARD, HVDKIT, Benchmark, Machine, Variant, arguments
from benchmarks.worker import engine_in_use, serve

if TYPE_CHECKING:
    import torch

KERAS = "keras"
PROBES = ("python-cost", "memory")

BENCHMARK = Benchmark(
    program=REPOSITORY / "scripts" / "bench_sync",
    framework="torch",
    step="backward and synchronisation",
    models=("resnet50", "transformer"),
    wires={
        ("hvdkit", "gloo"): ("fp32", "fp16", "bf16", "int8"),
        ("hvdkit", "mpi"): ("fp32", "fp16", "bf16", "int8"),
        ("flat", "gloo"): ("fp32", "fp16"),
        ("before", "gloo"): ("fp32", "fp16", "bf16"),
        ("stock", "gloo"): ("fp32", "fp16"),
        ("stock", "mpi"): ("fp32", "fp16"),
        ("engine", "gloo"): ("fp32", "fp16"),
        ("engine", "mpi"): ("fp32", "fp16"),
        ("ddp", "gloo"): ("fp32", "fp16"),
        (KERAS, "gloo"): ("fp32", "fp16"),
    },
    pairs=(
        ("hvdkit-gloo-fp32", "flat-gloo-fp32"),
        ("hvdkit-gloo-fp16", "flat-gloo-fp16"),
        ("hvdkit-gloo-fp32", "before-gloo-fp32"),
        ("hvdkit-gloo-fp16", "before-gloo-fp16"),
        ("hvdkit-gloo-bf16", "before-gloo-bf16"),
        ("hvdkit-gloo-fp32", "stock-gloo-fp32"),
        ("hvdkit-gloo-fp32", "engine-gloo-fp32"),
        ("hvdkit-gloo-fp32", "ddp-gloo-fp32"),
        ("hvdkit-mpi-fp32", "stock-mpi-fp32"),
        ("hvdkit-mpi-fp32", "engine-mpi-fp32"),
        ("hvdkit-gloo-fp16", "stock-gloo-fp16"),
        ("hvdkit-gloo-fp16", "ddp-gloo-fp16"),
        ("hvdkit-gloo-int8", "ddp-gloo-fp16"),
        ("hvdkit-gloo-fp16", "hvdkit-gloo-fp32"),
        ("hvdkit-gloo-bf16", "hvdkit-gloo-fp16"),
        ("hvdkit-gloo-int8", "hvdkit-gloo-fp16"),
        ("hvdkit-mpi-fp16", "stock-mpi-fp16"),
        ("hvdkit-mpi-fp16", "hvdkit-mpi-fp32"),
        ("engine-gloo-fp32", "stock-gloo-fp32"),
        ("engine-mpi-fp32", "stock-mpi-fp32"),
        ("ddp-gloo-fp16", "ddp-gloo-fp32"),
        ("keras-gloo-fp32", "hvdkit-gloo-fp32"),
        ("keras-gloo-fp16", "hvdkit-gloo-fp16"),
    ),
    # bfloat16 over MPI gives the same as over Gloo.
    on_demand=frozenset(
        {"hvdkit-mpi-bf16", "hvdkit-mpi-int8", "keras-gloo-fp32", "keras-gloo-fp16"}
    ),
)

PROBE_SECONDS = 900
PROBE_STEPS = 2000
PROBE_PARAMETERS = 1000


# --- the runner ---------------------------------------------------------------------------------


def main(description: str) -> int:
    """Run the command line. Return the exit status.

    Args:
        description: of the script, for `--help`.
    """
    parser = arguments(
        BENCHMARK,
        description,
        "examples:\n"
        "  hvdkit build --patches minimal --target stock/\n"
        "  scripts/bench_sync --stock stock/ --steps 30\n"
        "  scripts/bench_sync --variants hvdkit-gloo-fp32,ddp-gloo-fp32 --models resnet50\n"
        "  sudo scripts/bench_sync --stock stock/ --networks 1gbit --ranks-per-host 2\n"
        "  scripts/bench_sync --stock stock/ --python-cost\n"
        "  scripts/bench_sync --stock stock/ --memory",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--python-cost",
        action="store_true",
        help=f"measure the cost of {PROBE_PARAMETERS} parameters of 2 elements instead, per "
        f"parameter and step, on one rank and on two, and the growth of resident memory (--steps: "
        f"{PROBE_STEPS})",
    )
    only.add_argument(
        "--memory",
        action="store_true",
        help="measure instead by how much synchronisation increases the peak of resident memory, "
        "in training ResNet-50 on two ranks",
    )
    options = parser.parse_args()
    instead = options.python_cost or options.memory
    work = (lambda: probe(options)) if instead else (lambda: measure(BENCHMARK, options))
    return run_command(work, "bench_sync")


def probe(options: argparse.Namespace) -> None:
    """Show the Python cost or the memory of each variant, each in a job of its own."""
    machine = Machine(BENCHMARK, options)
    task = PROBES[0] if options.python_cost else PROBES[1]
    variants = machine.variants(["gloo"])
    answers: dict[str, Any] = {}
    for variant in variants:
        for size in (1, 2) if task == "python-cost" else (2,):
            print(f"{task}: {variant.name}, ranks: {size}", flush=True)
            spec = {"task": task, "size": size, "steps": options.steps or PROBE_STEPS}
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                # Return freed memory to the system at once: it must not hide later allocations.
                env = {"MALLOC_MMAP_THRESHOLD_": "65536"} if task == "memory" else {}
                job = Job(machine, variant, Path(folder), spec, env=env)
                with job.launch() as group:
                    results = group.wait(PROBE_SECONDS)
            lines = [json.loads(result.output.splitlines()[-1]) for result in results]
            # The slowest rank, because the others would wait for it.
            answers[f"{variant.name}, {size}"] = max(lines, key=lambda line: line["cost"])
    save(options, {"task": task, "answers": answers})
    (show_python_cost if task == "python-cost" else show_memory)(answers)


def show_python_cost(answers: Mapping[str, Mapping[str, float]]) -> None:
    """Print the Python cost per parameter and step."""
    table = Table(title=f"{PROBE_PARAMETERS} parameters of 2 elements: what synchronisation adds")
    table.add_column("variant, ranks")
    for column in ("CPU us / parameter", "wall us / parameter", "memory grew by, bytes"):
        table.add_column(column, justify="right")
    for name, answer in answers.items():
        cells = [f"{answer['cost']:.2f}", f"{answer['wall']:.2f}", f"{answer['grown']:.0f}"]
        table.add_row(name, *cells)
    console().print(table)
    steps = next(iter(answers.values()))["steps"]
    console().print(
        f"The difference of two medians of {steps:.0f} steps: backward passes with and without "
        "synchronisation, in turns, in the same process. CPU time is that of the calling thread, "
        "without other threads and without waits that sleep. With one rank an optimizer may do "
        "nothing. Memory is the growth of resident memory during these steps."
    )


def show_memory(answers: Mapping[str, Mapping[str, float]]) -> None:
    """Print the peaks of memory."""
    table = Table(title="resnet50, 2 ranks: peak of resident memory while training, MB")
    table.add_column("variant, ranks")
    for column in ("without", "with", "more", "more / gradients"):
        table.add_column(column, justify="right")
    for name, answer in answers.items():
        more = answer["cost"]
        cells = [f"{answer[key] / 1e6:.1f}" for key in ("without", "with", "cost")]
        table.add_row(name, *cells, f"{more / answer['bytes']:.2f}")
    console().print(table)
    console().print(
        "In one process, after hvd.init(): steps of the plain optimizer, then of the variant. The "
        "peak is VmHWM of /proc/self/status over 3 steps, after 3 unmeasured ones and a reset "
        "through /proc/self/clear_refs. The difference includes the engine's own buffers."
    )


# --- the ranks ----------------------------------------------------------------------------------


def rank_main(spec: Mapping[str, Any]) -> None:
    """Run a rank of the benchmark."""
    if spec["task"] == "turns":
        serve(spec, lambda: Backward(spec))
    else:
        {"python-cost": python_cost, "memory": memory}[spec["task"]](spec)


class Framework:
    """The library of a variant: connects the ranks and wraps the optimizer."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        self._spec = spec
        self.variant = Variant(*spec["variant"])
        self.rank = spec["rank"]
        self._hvd: Any = None
        if self.variant.optimizer == "ddp":
            import torch.distributed as dist

            # All ranks can access this file, in any network namespace.
            where = f"file://{spec['store']}"
            size = spec["size"]
            dist.init_process_group("gloo", init_method=where, rank=self.rank, world_size=size)
        elif self.variant.optimizer != BACKWARD:
            library = "hvdkit" if self.variant.optimizer in (*HVDKIT, KERAS) else "horovod"
            adapter = "torch"
            if self.variant.optimizer == KERAS:
                os.environ["KERAS_BACKEND"] = adapter
                adapter = "keras"
            hvd = importlib.import_module(f"{library}.{adapter}")
            engine_in_use(spec, hvd)
            self._hvd, self.rank = hvd, hvd.rank()

    def wrap(
        self, model: "torch.nn.Module", plain: "torch.optim.Optimizer"
    ) -> tuple[Any, Any, Callable[[Any], None], Callable[[], AbstractContextManager[None]]]:
        """Wrap a model and an optimizer.

        Returns:
            The model; the optimizer; a function that runs the backward pass of a loss and reduces
            the gradients; a context for the optimizer's step.
        """
        variant = self.variant
        if variant.optimizer == "ddp":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
            from torch.nn.parallel import DistributedDataParallel

            module = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if variant.wire == "fp16":
                module.register_comm_hook(None, default_hooks.fp16_compress_hook)
            return module, plain, _backward, contextlib.nullcontext
        if variant.optimizer == BACKWARD:
            return model, plain, _backward, contextlib.nullcontext
        if variant.optimizer == KERAS:
            return model, plain, self._keras_backward(model), contextlib.nullcontext
        settings: dict[str, Any] = {}
        if variant.optimizer in HVDKIT:
            if variant.wire != "fp32":
                settings["compression"] = variant.wire
            if self._spec["bucket_bytes"]:
                settings["bucket_bytes"] = self._spec["bucket_bytes"]
        elif variant.wire == "fp16":
            settings["compression"] = self._hvd.Compression.fp16
        named = model.named_parameters()
        wrapped = self._hvd.DistributedOptimizer(plain, named_parameters=named, **settings)

        def backward(loss: "torch.Tensor") -> None:
            loss.backward()
            wrapped.synchronize()

        return model, wrapped, backward, wrapped.skip_synchronize

    def _keras_backward(self, model: "torch.nn.Module") -> Callable[[Any], None]:
        import keras

        from hvdkit.keras.distribution import distribution_of

        class Reduce(keras.optimizers.Optimizer):
            """An optimizer that changes nothing."""

            def update_step(self, *_: Any) -> None:
                pass

        holder = keras.layers.TorchModuleWrapper(model)
        compression = "none" if self.variant.wire == "fp32" else self.variant.wire
        optimizer = self._hvd.DistributedOptimizer(Reduce(1e-5), compression=compression)
        distribution = distribution_of(optimizer)
        assert distribution is not None

        def backward(loss: "torch.Tensor") -> None:
            # As in Keras's train_step.
            with distribution.train_step_of(holder):
                optimizer.scale_loss(loss).backward()
                weights = holder.trainable_weights
                optimizer.apply([v.value.grad for v in weights], weights)

        return backward

    def close(self) -> None:
        """Leave the job."""
        if self._hvd is not None:
            self._hvd.shutdown()
        elif self.variant.optimizer == "ddp":
            import torch.distributed as dist

            dist.destroy_process_group()


def _backward(loss: "torch.Tensor") -> None:
    loss.backward()


class Backward:
    """A `worker.Workload`: the backward pass of a model, with synchronisation."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import torch

        self._framework = Framework(spec)
        # The same model on all ranks, with different data.
        torch.manual_seed(0)
        model = {"resnet50": resnet50, "transformer": transformer}[spec["model"]]()
        torch.manual_seed(1 + self._framework.rank)
        self._loss_of = {"resnet50": image_loss, "transformer": text_loss}[spec["model"]]()
        self._parameters = list(model.parameters())
        # A tiny learning rate: a loss near 0 would have denormal gradients, which are slow.
        plain = torch.optim.SGD(self._parameters, lr=1e-5)
        wrapped = self._framework.wrap(model, plain)
        self._module, self._optimizer, self._backward, self._synchronized = wrapped
        self._loss: Any = None
        self._norm: float | None = None

    def facts(self) -> dict[str, Any]:
        """Return the number and the bytes of the gradients."""
        size = sum(p.numel() * p.element_size() for p in self._parameters)
        return {"parameters": len(self._parameters), "bytes": size}

    def prepare(self) -> None:
        """Run the forward pass."""
        self._loss = self._loss_of(self._module)

    def step(self) -> None:
        """Run the backward pass and reduce all gradients."""
        self._backward(self._loss)

    def after_step(self) -> None:
        """Make the optimizer's step."""
        self._loss = None
        if self._norm is None:
            # Before the first step, because the variants' models differ afterwards.
            gradients = [p.grad.double() for p in self._parameters if p.grad is not None]
            self._norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
        with self._synchronized():
            self._optimizer.step()
        self._optimizer.zero_grad()

    def norm(self) -> float:
        """Return the norm of the first reduced gradients."""
        assert self._norm is not None
        return self._norm

    def close(self) -> None:
        """Leave the job."""
        self._framework.close()


def python_cost(spec: Mapping[str, Any]) -> None:
    """Print the cost of the wrapped optimizer per parameter, in microseconds."""
    import torch

    framework = Framework(spec)

    class Many(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            each = (torch.nn.Parameter(torch.ones(2)) for _ in range(PROBE_PARAMETERS))
            self.all = torch.nn.ParameterList(each)

        def forward(self) -> torch.Tensor:
            return torch.cat(list(self.all)).sum()

    def side(wrap: bool) -> Callable[[], tuple[float, float]]:
        model = Many()
        plain = torch.optim.SGD(model.parameters(), lr=1e-3)
        ways: Any = (model, plain, _backward, contextlib.nullcontext)
        module, optimizer, backward, synchronized = framework.wrap(model, plain) if wrap else ways

        def step() -> tuple[float, float]:
            loss = module()
            began, cpu_began = time.perf_counter(), time.thread_time()
            backward(loss)
            times = time.perf_counter() - began, time.thread_time() - cpu_began
            with synchronized():
                optimizer.step()
            optimizer.zero_grad()
            return times

        return step

    plain_step, wrapped_step = side(wrap=False), side(wrap=True)
    for _ in range(max(20, spec["steps"] // 4)):
        plain_step()
        wrapped_step()
    process = psutil.Process()
    # Filled before, so that the measurement does not allocate memory.
    times = [[0.0] * spec["steps"] for _ in range(4)]
    before = process.memory_info().rss
    for i in range(spec["steps"]):
        times[0][i], times[1][i] = plain_step()
        times[2][i], times[3][i] = wrapped_step()
    grown = process.memory_info().rss - before
    wall, cpu, wrapped_wall, wrapped_cpu = map(statistics.median, times)
    scale = 1e6 / PROBE_PARAMETERS
    cost, more = (wrapped_cpu - cpu) * scale, (wrapped_wall - wall) * scale
    print(json.dumps({"cost": cost, "wall": more, "grown": grown, "steps": spec["steps"]}))
    framework.close()


def memory(spec: Mapping[str, Any]) -> None:
    """Print by how many bytes synchronisation increases the peak of memory."""
    import torch

    framework = Framework(spec)
    torch.manual_seed(0)
    model = resnet50()
    loss_of = image_loss()
    plain = torch.optim.SGD(model.parameters(), lr=1e-5)

    def peak(
        module: Any,
        optimizer: Any,
        backward: Callable[[Any], None],
        synchronized: Callable[[], AbstractContextManager[None]],
    ) -> int:
        for i in range(6):
            if i == 3:
                Path("/proc/self/clear_refs").write_text("5")
            backward(loss_of(module))
            with synchronized():
                optimizer.step()
            optimizer.zero_grad()
        status = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    without = peak(model, plain, _backward, contextlib.nullcontext)
    with_it = peak(*framework.wrap(model, plain))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    answer = {"cost": with_it - without, "without": without, "with": with_it, "bytes": size}
    print(json.dumps(answer))
    framework.close()
