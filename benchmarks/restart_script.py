"""The training script of `restarts`: a small model, and a checkpoint every 50 steps.

    restart_script.py MODE FOLDER DEVICE

Each process appends the time of each step to a file of its own in the folder. MODE is `hvdkit` for
hvdkit's optimizer and checkpoints, `ddp` for DistributedDataParallel with `torch.save`, or
`elastic` for Horovod's elastic state. `memory-MB` is `hvdkit` with MB megabytes of state, of which
the newest step is kept in the memory of the host. DEVICE is `cpu` or `cuda`.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

_SAVE_STEPS = 50
_STEP_SECONDS = 0.01
_WIDTH = 1024

Step = Callable[[int], None]


def main() -> None:
    """Train until a signal ends this process."""
    name, folder, device = sys.argv[1:]
    mode, _, size = name.partition("-")
    torch.set_default_device(device)
    torch.manual_seed(0)
    # Weights and Adam's two moments.
    layers = round(int(size or 0) * 1_000_000 / (3 * 4 * _WIDTH * _WIDTH))
    width = _WIDTH if layers else 64
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        *(torch.nn.Linear(width, width, bias=False) for _ in range(layers)),
        torch.nn.Linear(width, 8),
    )
    optimizer = torch.optim.Adam(model.parameters())
    modes: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer, str], None]] = {
        "hvdkit": _hvdkit,
        "memory": partial(_hvdkit, in_memory=True),
        "ddp": _ddp,
        "elastic": _elastic,
    }
    modes[mode](model, optimizer, folder)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(16, 64)).square().sum().backward()
    optimizer.step()
    time.sleep(_STEP_SECONDS)


def _recorder(folder: str, rank: int, start: int = 0) -> Callable[[], None]:
    """Return a function that records the end of a step.

    Args:
        folder: the folder for the files.
        rank: the rank.
        start: the number of times that this process has begun to train.
    """
    name = f"rank-{rank}-{os.getpid()}-{start}"
    file = open(os.path.join(folder, name), "a", buffering=1)  # noqa: SIM115
    return lambda: print(time.time(), file=file)


def _hvdkit(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str, in_memory: bool = False
) -> None:
    import hvdkit.torch as hvd

    hvd.init()
    record = _recorder(folder, hvd.rank())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    path = os.path.join(folder, "checkpoints")
    with hvd.Checkpointer(
        path, model=model, optimizer=optimizer, every_steps_in_memory=1 if in_memory else None
    ) as checkpointer:
        restored = checkpointer.restore()
        step = restored.step if restored else 0
        while True:
            _step(model, optimizer)
            record()
            step += 1
            if in_memory:
                checkpointer.maybe_save(step)
            elif step % _SAVE_STEPS == 0:
                checkpointer.save(step)


def _ddp(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    # A prefix for each start: otherwise ranks may find the addresses of the last start.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = torch.distributed.PrefixStore(prefix, torch.distributed.TCPStore(address, port))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    record = _recorder(folder, rank)
    path = os.path.join(folder, "checkpoint.pt")
    step = 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    while True:
        _step(wrapped, optimizer)
        record()
        step += 1
        if step % _SAVE_STEPS == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step}, f"{path}.new")
            os.replace(f"{path}.new", path)


def _elastic(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    import horovod.torch as hvd

    hvd.init()
    starts = 0
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    @hvd.elastic.run
    def train(state):  # type: ignore[no-untyped-def]
        nonlocal starts
        starts += 1
        record = _recorder(folder, hvd.rank(), starts)
        while True:
            _step(model, optimizer)
            record()
            state.step += 1
            if state.step % _SAVE_STEPS == 0:
                state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main()
