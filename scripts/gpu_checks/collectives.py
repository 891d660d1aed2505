"""Every collective on GPU tensors: over NCCL, and through host memory."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_checks.command import environment
from gpu_checks.jobs import FULL_PATH, SHARED_GPU
from gpu_checks.part import REPOSITORY, Setting, main
from gpu_checks.report import Report, Skip
from hvdkit.engine.toolchain import which
from hvdkit.ranks import RankResult, RanksFailed, start_gloo, start_mpi

_RANK_SECONDS = 60
#: A part of hvdkit's message in place of NCCL's `invalid usage`.
_REFUSAL = "NCCL refuses two ranks on one GPU"


def run(setting: Setting, report: Report) -> None:
    """Run the collectives in each job that one GPU allows."""
    for engine, controller, size in (
        ("nccl", "gloo", 1),
        ("nccl", "gloo", 2),
        ("nccl", "mpi", 2),
        ("staged", "gloo", 2),
        ("staged", "mpi", 2),
    ):
        with report.check(f"collectives, {engine} engine, {controller}, ranks: {size}") as values:
            began = time.monotonic()
            results = _start(setting, engine, controller, size, "all", SHARED_GPU)
            answers = [_answer(result) for result in results]
            values["seconds"] = time.monotonic() - began
            values["checks"] = len(answers[0])
            failed = [
                f"rank {rank}, {name}: {error}"
                for rank, answer in enumerate(answers)
                for name, error in answer.items()
                if error
            ]
            if failed:
                raise AssertionError("; ".join(failed))
    with report.check("two ranks on one GPU with NCCL are refused by hvdkit's error") as values:
        if setting.dry:
            raise Skip("a dry run has no NCCL")
        for rank, result in enumerate(_start(setting, "nccl", "gloo", 2, "refused")):
            message = _answer(result)["allreduce"] or "no error"
            values[f"rank {rank}"] = message
            if _REFUSAL not in message:
                raise AssertionError(f"rank {rank} got {message!r}; expected {_REFUSAL!r}")


def _start(
    setting: Setting,
    engine: str,
    controller: str,
    size: int,
    task: str,
    variables: Mapping[str, str] | None = None,
) -> Sequence[RankResult]:
    python = setting.pythons[engine]
    command = [python, "-m", "gpu_checks.collectives", "--rank", task, setting.device]
    env = environment(os.environ) | {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        **(FULL_PATH if size == 1 else {}),
        **(variables or {}),
    }
    if controller == "gloo":
        group = start_gloo(command, size, env=env, cwd=REPOSITORY)
    else:
        mpirun = which("mpirun")
        if mpirun is None:
            raise Skip("there is no mpirun in the environment")
        group = start_mpi(command, size, mpirun=mpirun, env=env, cwd=REPOSITORY)
    try:
        return group.wait(_RANK_SECONDS)
    except RanksFailed as error:
        raise AssertionError(str(error)) from error


def _answer(result: RankResult) -> dict[str, str | None]:
    for line in reversed(result.output.splitlines()):
        if line.startswith("{"):
            answer: dict[str, str | None] = json.loads(line)
            return answer
    raise AssertionError(f"rank {result.rank} printed no result:\n{result.output[-2000:]}")


# --- the ranks ----------------------------------------------------------------------------------


def rank_main(task: str, device: str) -> None:
    """Run one task on this rank and print check -> error, or null, as JSON."""
    import hvdkit.torch as hvd

    hvd.init()
    checks = {"all": _checks, "refused": _refused}[task](hvd, device)
    answers: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
            if isinstance(error, hvd.HorovodInternalError):
                break  # the engine has stopped
        else:
            answers[name] = None
    print(json.dumps(answers), flush=True)
    hvd.shutdown()


def _refused(hvd: Any, device: str) -> Mapping[str, Callable[[], None]]:
    import torch

    return {"allreduce": lambda: hvd.allreduce(torch.ones(4, device=device), name="refused")}


def _checks(hvd: Any, device: str) -> Mapping[str, Callable[[], None]]:
    """Return the checks: small whole numbers, which every dtype holds exactly."""
    import torch

    rank, size = hvd.rank(), hvd.size()
    ranks = range(size)

    def own(dtype: torch.dtype, of: int, count: int = 20) -> torch.Tensor:
        return ((torch.arange(count) % 5 + 1) * (of + 1)).to(dtype).to(device)

    def equal(result: torch.Tensor, expected: torch.Tensor) -> None:
        assert result.device.type == torch.device(device).type, f"the result is on {result.device}"
        assert torch.equal(result, expected.to(result.dtype)), f"{result} instead of {expected}"

    def summed(dtype: torch.dtype) -> torch.Tensor:
        return sum((own(dtype, r) for r in ranks), torch.zeros(20, dtype=dtype, device=device))

    checks: dict[str, Callable[[], None]] = {}
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype in (*floats, torch.int32, torch.int64):
        name = str(dtype).removeprefix("torch.")
        checks[f"allreduce of {name}"] = lambda d=dtype, n=name: equal(
            hvd.allreduce(own(d, rank), op=hvd.Sum, name=f"sum.{n}"), summed(d)
        )
        checks[f"grouped allreduce of {name}"] = lambda d=dtype, n=name: [
            equal(result, summed(d))
            for result in hvd.grouped_allreduce(
                [own(d, rank), own(d, rank)], op=hvd.Sum, name=f"grouped.{n}"
            )
        ]
        checks[f"broadcast of {name}"] = lambda d=dtype, n=name: equal(
            hvd.broadcast(own(d, rank), size - 1, name=f"broadcast.{n}"), own(d, size - 1)
        )
    for dtype in floats:
        name = str(dtype).removeprefix("torch.")
        checks[f"average of {name}"] = lambda d=dtype, n=name: equal(
            hvd.allreduce(own(d, rank), op=hvd.Average, name=f"mean.{n}"), summed(d) / size
        )
        checks[f"scaled allreduce of {name}"] = lambda d=dtype, n=name: equal(
            hvd.allreduce(
                own(d, rank),
                op=hvd.Sum,
                prescale_factor=0.5,
                postscale_factor=4.0,
                name=f"scaled.{n}",
            ),
            summed(d) * 2,
        )
    largest, smallest = own(torch.float32, size - 1), own(torch.float32, 0)
    checks["maximum"] = lambda: equal(
        hvd.allreduce(own(torch.float32, rank), op=hvd.Max, name="max"), largest
    )
    checks["minimum"] = lambda: equal(
        hvd.allreduce(own(torch.float32, rank), op=hvd.Min, name="min"), smallest
    )
    checks["allgather of different lengths"] = lambda: equal(
        hvd.allgather(own(torch.float32, rank, rank + 1), name="gather"),
        torch.cat([own(torch.float32, r, r + 1) for r in ranks]),
    )
    checks["alltoall"] = lambda: equal(
        hvd.alltoall(own(torch.float32, rank, size), name="alltoall"),
        torch.stack([own(torch.float32, r, size)[rank] for r in ranks]),
    )
    checks["reducescatter"] = lambda: equal(
        hvd.reducescatter(own(torch.float32, rank), op=hvd.Sum, name="reducescatter"),
        summed(torch.float32).tensor_split(size)[rank],
    )
    checks["many in flight"] = lambda: _many(hvd, device)
    checks["a process set"] = lambda: _process_set(hvd, own(torch.float32, rank))
    checks["broadcast_parameters"] = lambda: _broadcast(hvd, device)
    checks["join beside CPU and GPU collectives"] = lambda: _join(hvd, device)
    return checks


def _many(hvd: Any, device: str) -> None:
    """Check 200 small in-place allreduces at once, whose results are used on the stream."""
    import torch

    tensors = [torch.full((100,), float(i), device=device) for i in range(200)]
    handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=f"many.{i}") for i, t in enumerate(tensors)]
    for i, handle in enumerate(handles):
        result = hvd.synchronize(handle)
        assert bool((result == i * hvd.size()).all()), f"allreduce {i} gives {result[0]}"


def _process_set(hvd: Any, tensor: Any) -> None:
    import torch

    last = hvd.add_process_set([hvd.size() - 1]) if hvd.size() > 1 else hvd.global_process_set
    try:
        if last.included():
            result = hvd.allreduce(tensor, op=hvd.Sum, name="set", process_set=last)
            assert torch.equal(result, tensor)
    finally:
        if hvd.size() > 1:
            hvd.remove_process_set(last)


def _broadcast(hvd: Any, device: str) -> None:
    import torch

    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None]
    everyone = hvd.allgather(flat, name="weights")
    assert all(torch.equal(everyone[0], other) for other in everyone), "weights differ"


def _join(hvd: Any, device: str) -> None:
    """Check sums on both devices while rank 0 has joined and the others have not."""
    import torch

    others = hvd.size() - 1
    if hvd.rank() or not others:
        for place in {"cpu", device}:
            result = hvd.allreduce(torch.ones(5, device=place), op=hvd.Sum, name=f"join.{place}")
            expected = max(others, 1)
            assert bool((result == expected).all()), f"{result} on {place} instead of {expected}"
    hvd.join()


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank_main(*sys.argv[2:])
    else:
        main("collectives", run)
