"""The programs of the jobs of `checkpoint`."""

import os

# Set before CUDA is initialised, so that cuBLAS computes the same sums in every process.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import hashlib
import random
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

import hvdkit.torch as hvd
from gpu_checks import trace
from gpu_checks.jobs import answer, spec

FEATURES = 64


def trainings(told: Mapping[str, Any]) -> dict[str, Any]:
    """Run the trainings in sequence and return their results by name."""
    torch.use_deterministic_algorithms(True)
    hvd.init()
    found = {name: train(told, run) for name, run in told["runs"].items()}
    hvd.shutdown()
    return found


def train(told: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Train a model with dropout. Restore or save a checkpoint if `run` asks for it.

    Args:
        told: `folder` of the checkpoints, `device` and `compression`.
        run: one of `checkpoint.RUNS`.

    Returns:
        Digests of the state at the end, and after the restore or at the save; the devices of the
        optimizer's state; the error of a step that failed after a restore.
    """
    device = told["device"]
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 256),
        torch.nn.LayerNorm(256),
        torch.nn.GELU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(256, 8),
    ).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
        model.named_parameters(),
        compression=told["compression"],
    )
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + hvd.rank())
    found: dict[str, Any] = {}
    with hvd.Checkpointer(
        told["folder"], model=model, optimizer=optimizer, overwrite=not run["restore"]
    ) as checkpointer:
        step = 0
        if run["restore"]:
            restored = checkpointer.restore()
            if restored is None:
                raise SystemExit(f"there is no checkpoint in {run['folder']}")
            step = restored.step
            found["restored"] = digests(model, optimizer, device)
        found["devices"] = devices(optimizer)
        try:
            while step < run["until"]:
                train_step(model, optimizer, device)
                step += 1
                if step == run["save_at"]:
                    found["saved"] = digests(model, optimizer, device)
                    # Asynchronous: the next steps change the state while it is written.
                    checkpointer.save(step)
        except Exception as error:
            if not run["restore"]:
                raise
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"[:500]
    found["end"] = digests(model, optimizer, device)
    return found


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    """Train one step on data from all generators of random numbers."""
    inputs = torch.randn(16, FEATURES, device=device)
    inputs += torch.randn(16, FEATURES).to(device)
    inputs *= random.random() + float(np.random.rand())
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digests(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> dict[str, str]:
    """Return a digest of the weights, of the optimizer's state and of the random numbers."""
    state = optimizer.state_dict()["state"]
    return {
        "weights": _digest(model.state_dict().values()),
        "optimizer": _digest(state[i][key] for i in sorted(state) for key in sorted(state[i])),
        "random numbers": _digest(
            [
                torch.tensor(random.getstate()[1]),
                torch.from_numpy(np.random.get_state()[1].copy()),
                torch.get_rng_state(),
                *([torch.cuda.get_rng_state()] if device == "cuda" else []),
            ]
        ),
    }


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def devices(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the devices of the optimizer's state: `exp_avg` -> `cpu` or `cuda:0, cpu`."""
    found: dict[str, Counter[str]] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found.setdefault(key, Counter())[str(value.device)] += 1
    return {key: ", ".join(sorted(counts)) for key, counts in found.items()}


def staging(told: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the copy of the state to the host: that of `save`, and two ways by hand.

    Returns:
        Bytes, and for each way its bytes per second; and how many of the copies of a save go to
        pageable memory (CUDA only).
    """
    device, nbytes, count = told["device"], told["bytes"], 16
    cuda = device == "cuda"
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randn(nbytes // 4 // count, device=device)) for _ in range(count)
    )
    tensors = [p.detach() for p in model]
    found: dict[str, Any] = {"bytes": sum(t.numel() * t.element_size() for t in tensors)}

    def rate(work: Callable[[], None], repeats: int = 3) -> float:
        seconds = []
        # The first run allocates the memory.
        for _ in range(1 + repeats):
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return found["bytes"] / statistics.median(seconds[1:])

    def by_hand(target: torch.Tensor, asynchronous: bool) -> Callable[[], None]:
        parts = target.split(tensors[0].numel())

        def copy() -> None:
            for part, tensor in zip(parts, tensors, strict=True):
                part.copy_(tensor, non_blocking=asynchronous)
            if cuda:
                torch.cuda.synchronize()

        return copy

    found["pageable"] = rate(by_hand(torch.zeros(found["bytes"] // 4), False))
    if cuda:
        pinned = torch.zeros(found["bytes"] // 4, pin_memory=True)
        found["pinned"] = rate(by_hand(pinned, True))
        del pinned
    with hvd.Checkpointer(told["folder"], model=model, keep_last=1, overwrite=True) as checkpointer:
        seconds = []
        for step in range(1, 4):
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            checkpointer.save(step)
            seconds.append(time.perf_counter() - began)
            # The write must not slow the next copy down.
            checkpointer.wait()
        found["first save"] = found["bytes"] / seconds[0]
        found["save"] = found["bytes"] / min(seconds[1:])
        counts = trace.count(trace.record(lambda: checkpointer.save(4), cuda))
    found |= {name: counts[name] for name in ("copies to the host", "pageable copies to the host")}
    hvd.shutdown()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    _told = spec()
    answer({"trainings": trainings, "staging": staging}[_told["task"]](_told))
