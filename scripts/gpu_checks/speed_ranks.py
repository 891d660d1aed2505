"""The programs of the jobs of `speed`: one rank each."""

import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from gpu_checks import models, trace
from gpu_checks.jobs import answer, spec
from gpu_checks.part import REPOSITORY
from gpu_checks.turns import take_turns

COMPRESSIONS = ("none", "fp16", "bf16")

#: The free memory in bytes that a dry run assumes.
DRY_BYTES = 40_000_000


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], None], device: str) -> float:
    """Return the seconds that the device needs for `work`, gaps between kernels included."""
    if device != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def median_seconds(
    work: Callable[[], None],
    device: str,
    repeats: int,
    prepare: Callable[[], None] = lambda: None,
) -> float:
    """Return the median seconds of `work`, after three runs to warm up."""
    seconds = []
    for _ in range(3 + repeats):
        prepare()
        seconds.append(seconds_of(work, device))
    return statistics.median(seconds[3:])


# --- memory: copying, packing, unpacking --------------------------------------------------------


def memory(told: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the device's copy and the passes over the buckets of two models."""
    device, dry = told["device"], told["dry"]
    nbytes = 1 << (24 if dry else 31)
    repeats = 3 if dry else 20
    found: dict[str, Any] = {"copy": copy(device, nbytes, repeats)}
    if device == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
    else:
        free = DRY_BYTES
    of_models = {"resnet50": models.resnet50_shapes(), "llama-7b": models.llama_shapes()}
    if dry:
        of_models["llama-7b"] = models.llama_shapes(2, 128, 344, 1000)
    for name, whole in of_models.items():
        # Gradients, a float32 bucket and a 16-bit one: 4 + 4 + 2 bytes.
        shapes = models.cut(whole, free // 2, 10)
        try:
            found[name] = passes(shapes, device, repeats)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def copy(device: str, nbytes: int, repeats: int) -> dict[str, float]:
    """Measure `copy_` on the device."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)

    def work() -> None:
        for _ in range(4):
            target.copy_(source)

    seconds = median_seconds(work, device, repeats) / 4
    return {"bytes": 2 * nbytes, "seconds": seconds, "bytes_per_second": 2 * nbytes / seconds}


def passes(shapes: Sequence[models.Shape], device: str, repeats: int) -> dict[str, Any]:
    """Measure packing, casting and unpacking of all buckets of a model.

    Returns:
        For each pass its bytes (read and written), seconds (device) and host seconds; and the
        numbers of elements, parameters and buckets.
    """
    from hvdkit.reduction import bucketing
    from hvdkit.torch.reduction.memory import TorchMemory, spec

    # The values of parameters are not used, so all share the memory of the largest one.
    shared = torch.zeros(max(map(prod, shapes)), device=device)
    parameters = [torch.nn.Parameter(shared[: prod(shape)].view(shape)) for shape in shapes]
    gradients = [torch.ones_like(p) for p in parameters]
    plan = bucketing.plan([spec(f"p{i}", p) for i, p in enumerate(parameters)])
    elements = sum(map(prod, shapes))
    facts: dict[str, Any] = {
        "elements": elements,
        "parameters": len(shapes),
        "buckets": len(plan.buckets),
    }
    found: dict[str, Any] = {}

    def memories() -> list[TorchMemory]:
        return [TorchMemory(b, [parameters[i] for i in b.parameters]) for b in plan.buckets]

    def put_back() -> None:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient

    def measure(
        name: str,
        bytes_per_element: int,
        work: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        seconds = median_seconds(work, device, repeats, prepare)
        # Once more, to measure how long the host is busy.
        prepare()
        synchronize(device)
        began = time.perf_counter()
        work()
        host = time.perf_counter() - began
        synchronize(device)
        nbytes = bytes_per_element * elements
        found[name] = {"bytes": nbytes, "seconds": seconds, "host_seconds": host}

    def in_float32(held: Sequence[TorchMemory]) -> None:
        def scale() -> None:
            for memory in held:
                memory.in_place(0.5)

        measure("gradients into float32 buckets, scaled", 8, scale, put_back)
        measure("float32 buckets, scaled in place", 8, scale)
        put_back()

    def in_16_bits(held: Sequence[TorchMemory], dtype: str, factor: float) -> None:
        buffers: list[torch.Tensor] = []

        def pack() -> None:
            buffers.extend(memory.pack(dtype, factor) for memory in held)

        def pack_anew() -> None:
            buffers.clear()
            pack()

        def unpack() -> None:
            for memory, buffer in zip(held, buffers, strict=True):
                memory.unpack(buffer, 0.5 / factor)

        measure(f"pack as {dtype}", 6, pack, buffers.clear)
        measure(f"unpack from {dtype}", 6, unpack, pack_anew)

    put_back()
    in_float32(memories())
    in_16_bits(memories(), "float16", 1024.0)
    in_16_bits(memories(), "bfloat16", 1.0)
    return facts | {"passes": found}


# --- counts: kernel launches and synchronisations -----------------------------------------------


def counts(told: Mapping[str, Any]) -> dict[str, Any]:
    """Count launches, synchronisations and waits of a training step of each variant."""
    import hvdkit.torch as hvd

    hvd.init()
    device, dry = told["device"], told["dry"]
    waits = _count_waits()
    found: dict[str, Any] = {}
    for variant in ("plain", *COMPRESSIONS):
        step = training_step("resnet50", variant, device, dry)
        # fp16 adjusts its scale in the first steps.
        for _ in range(3 if dry else 10):
            step()
        synchronize(device)
        steps = 2 if dry else 5
        waits.clear()
        began = time.perf_counter()

        def work(step: Callable[[], None] = step, steps: int = steps) -> None:
            for _ in range(steps):
                step()

        work()
        host = (time.perf_counter() - began) / steps
        synchronize(device)
        both = (time.perf_counter() - began) / steps
        waited = trace.per_step(waits, steps)
        events = trace.record(work, device == "cuda")
        found[variant] = {
            **trace.per_step(trace.count(events), steps),
            "waits for Horovod": waited.get("calls", 0.0),
            "seconds in waits": waited.get("seconds", 0.0),
            "host_seconds": host,
            "seconds": both,
            "implicit": implicit_synchronizations(step, device),
        }
        del step
    hvd.shutdown()
    return found


def _count_waits() -> Counter[str]:
    """Count the calls of the function in which Horovod waits for a handle, and their seconds."""
    from horovod.torch import mpi_ops

    waits: Counter[str] = Counter()
    original = mpi_ops.mpi_lib.horovod_torch_wait_and_clear

    def wait_and_clear(handle: int) -> Any:
        began = time.perf_counter()
        try:
            return original(handle)
        finally:
            waits["calls"] += 1
            waits["seconds"] += time.perf_counter() - began

    mpi_ops.mpi_lib.horovod_torch_wait_and_clear = wait_and_clear
    return waits


def implicit_synchronizations(step: Callable[[], None], device: str) -> dict[str, int]:
    """Count the warnings of PyTorch's sync debug mode in one step, by the line that causes them.

    Returns:
        The innermost line of hvdkit on the stack, or else the innermost line at all -> number.
    """
    if device != "cuda":
        return {}
    lines: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            lines[_place(traceback.extract_stack()[:-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(lines)


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    package = str(REPOSITORY / "hvdkit")
    own = [frame for frame in stack if frame.filename.startswith(package)]
    frame = (own or list(stack))[-1]
    name = frame.filename.removeprefix(f"{REPOSITORY}/")
    return f"{name}:{frame.lineno} {frame.line}"


# --- turns: step times --------------------------------------------------------------------------


def turns(told: Mapping[str, Any]) -> None:
    """Take turns with other processes: one training step at a time."""
    take_turns(told["socket"], lambda: timed_variants(told))
    if "ddp" in told["variants"]:
        torch.distributed.destroy_process_group()


def timed_variants(told: Mapping[str, Any]) -> dict[str, Callable[[], float]]:
    """Build the variants of this process and warm them up."""
    device = told["device"]
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    if any(variant not in ("plain", "ddp") for variant in told["variants"]):
        import hvdkit.torch as hvd

        hvd.init()
    if "ddp" in told["variants"]:
        store = Path(told["socket"]).with_suffix(".store")
        torch.distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=0,
            world_size=1,
        )
    variants = {}
    for name in told["variants"]:
        step = training_step(told["model"], name, device, told["dry"])
        for _ in range(2 if told["dry"] else 6):
            step()
        variants[name] = _timed(step, device)
    return variants


def _timed(step: Callable[[], None], device: str) -> Callable[[], float]:
    def timed() -> float:
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        return time.perf_counter() - began

    return timed


def training_step(model_name: str, variant: str, device: str, dry: bool) -> Callable[[], None]:
    """Return a function that trains one step.

    Args:
        model_name: `resnet50` or `gpt`.
        variant: `plain`, `ddp`, `hvdkit` (compression none) or a compression.
        device: `cuda` or `cpu`.
        dry: small sizes.
    """
    model = models.build(model_name, device, dry)
    optimizer: torch.optim.Optimizer
    # Small rates: a loss near 0 would have denormal gradients.
    if model_name == "resnet50":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    module = model
    if variant == "ddp":
        ids = [0] if device == "cuda" else None
        module = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True
        )
    elif variant != "plain":
        import hvdkit.torch as hvd

        optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            compression="none" if variant == "hvdkit" else variant,
        )
    loss = models.loss_function(model_name, module, device, dry)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    _told = spec()
    if _told["dry"]:
        torch.set_num_threads(1)
    if _told["task"] == "turns":
        turns(_told)
        answer({})
    else:
        answer({"memory": memory, "counts": counts}[_told["task"]](_told))
