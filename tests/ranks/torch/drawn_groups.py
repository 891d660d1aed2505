"""Drawn calls in drawn groups of the backend `hvd` of torch.distributed, compared with NumPy.

    hvdkit run -np 4 python -m tests.ranks.torch.drawn_groups --calls 10000 --seed 1

All ranks draw the same calls. They wait for asynchronous calls in orders of their own.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
#: PyTorch's Gloo serves uint8.
DTYPES = [*FLOATS, torch.int32, torch.int64, torch.uint8]
REDUCTIONS = {"SUM": np.sum, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod, "AVG": np.mean}
_IN_FLIGHT = 5


def values(size: int, dtype: torch.dtype, rank: int, number: int) -> torch.Tensor:
    """Return whole numbers whose sums and products over 4 ranks are exact in each dtype."""
    return ((torch.arange(size) * (number % 7 + 1) + rank + number) % 3 + 1).to(dtype)


class Call:
    """One call of a group: its tensors, and the values that they must have."""

    def __init__(self, draw: random.Random, number: int, ranks: list[int], rank: int) -> None:
        self.place, self.count = ranks.index(rank), len(ranks)
        self.name = draw.choice(sorted(OPERATIONS))
        self.dtype = draw.choice(DTYPES)
        # 4 bytes to 8 MB, most of them small.
        size = int(2 ** (21 * draw.random() ** 2))
        self.splits = [
            [draw.randrange(size // self.count + 2) for _ in ranks] for _ in range(self.count)
        ]
        self.root = draw.randrange(self.count)
        self.reduction = draw.choice(sorted(REDUCTIONS))
        self.asynchronous, self.strided = draw.random() < 0.5, draw.random() < 0.2
        if self.reduction == "AVG" and self.dtype not in FLOATS:
            self.reduction = "SUM"
        if self.dtype == torch.uint8 or (self.dtype == torch.bfloat16 and self.reduction != "AVG"):
            self.reduction = "SUM"  # Gloo has no other of bfloat16
        if self.name == "reduce" or self.dtype in (torch.uint8, torch.float16, torch.bfloat16):
            self.strided = False  # Gloo serves some of these calls, and ignores strides
        self.part = max(size // self.count, 1)
        inputs = [values(self.part * self.count, self.dtype, r, number) for r in ranks]
        self.inputs = [t.double().numpy() for t in inputs]
        self.own = self.tensor(inputs[self.place])
        self.roots = ranks

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        """Return a tensor with these elements, which may have gaps between them."""
        return torch.stack([data, data], dim=1)[:, 0] if self.strided else data.clone()

    def empty(self, size: int) -> torch.Tensor:
        """Return an output."""
        return self.tensor(torch.zeros(size, dtype=self.dtype))

    def reduced(self) -> np.ndarray:
        """Return the right result of an allreduce."""
        return REDUCTIONS[self.reduction](np.stack(self.inputs), axis=0)

    @property
    def op(self) -> dist.ReduceOp:
        """The reduction."""
        return getattr(dist.ReduceOp, self.reduction)

    def description(self) -> str:
        """Return what is needed to find the call."""
        facts = (self.name, self.dtype, self.part, self.reduction, self.asynchronous, self.strided)
        return " ".join(map(str, (*facts, self.roots)))


Started = tuple[object, Callable[[], list[tuple[torch.Tensor, np.ndarray]]]]


def _all_reduce(call: Call, options: dict) -> Started:
    return dist.all_reduce(call.own, call.op, **options), lambda: [(call.own, call.reduced())]


def _reduce_scatter_tensor(call: Call, options: dict) -> Started:
    output, begin = call.empty(call.part), call.place * call.part
    work = dist.reduce_scatter_tensor(output, call.own, call.op, **options)
    return work, lambda: [(output, call.reduced()[begin : begin + call.part])]


def _reduce_scatter(call: Call, options: dict) -> Started:
    output, begin = call.empty(call.part), call.place * call.part
    work = dist.reduce_scatter(output, list(call.own.split(call.part)), call.op, **options)
    return work, lambda: [(output, call.reduced()[begin : begin + call.part])]


def _all_gather_into_tensor(call: Call, options: dict) -> Started:
    output = call.empty(len(call.own) * call.count)
    work = dist.all_gather_into_tensor(output, call.own, **options)
    return work, lambda: [(output, np.concatenate(call.inputs))]


def _all_gather(call: Call, options: dict) -> Started:
    outputs = [call.empty(len(call.own)) for _ in range(call.count)]
    work = dist.all_gather(outputs, call.own, **options)
    return work, lambda: list(zip(outputs, call.inputs, strict=True))


def _broadcast(call: Call, options: dict) -> Started:
    work = dist.broadcast(call.own, call.roots[call.root], **options)
    return work, lambda: [(call.own, call.inputs[call.root])]


def _all_to_all_single(call: Call, options: dict) -> Started:
    output, begin = call.empty(len(call.own)), call.place * call.part
    work = dist.all_to_all_single(output, call.own, **options)
    expected = np.concatenate([data[begin : begin + call.part] for data in call.inputs])
    return work, lambda: [(output, expected)]


def _all_to_all(call: Call, options: dict) -> Started:
    sizes = [[min(n, call.part * call.count) for n in row] for row in call.splits]
    sent = [call.own[:n] for n in sizes[call.place]]
    outputs = [call.empty(row[call.place]) for row in sizes]
    work = dist.all_to_all(outputs, sent, **options)
    expected = [data[: len(t)] for data, t in zip(call.inputs, outputs, strict=True)]
    return work, lambda: list(zip(outputs, expected, strict=True))


def _reduce(call: Call, options: dict) -> Started:
    if call.reduction == "AVG":
        call.reduction = "SUM"  # Gloo does not have it
    work = dist.reduce(call.own, call.roots[call.root], call.op, **options)
    return work, lambda: [(call.own, call.reduced())] if call.place == call.root else []


def _barrier(_call: Call, options: dict) -> Started:
    return dist.barrier(**options), list


OPERATIONS: dict[str, Callable[[Call, dict], Started]] = {
    f.__name__[1:]: f
    for f in (
        _all_reduce,
        _reduce_scatter_tensor,
        _reduce_scatter,
        _all_gather_into_tensor,
        _all_gather,
        _broadcast,
        _all_to_all_single,
        _all_to_all,
        _reduce,
        _barrier,
    )
}


def _compare(call: Call, number: int, pairs: list[tuple[torch.Tensor, np.ndarray]]) -> None:
    exact = call.reduction != "AVG"
    for tensor, expected in pairs:
        close = np.array_equal if exact else functools.partial(np.allclose, rtol=1e-2)
        assert close(tensor.double().numpy(), expected), (number, call.description())


def draw_calls(seed: int, calls: int) -> None:
    """Make drawn calls in drawn groups. torch.distributed is initialized, with 2 to 4 ranks.

    Raises:
        AssertionError: a result differs from NumPy's.
    """
    draw, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    order = random.Random(rank)
    everyone = list(range(size))
    groups = [(everyone, dist.group.WORLD)]
    pending: list[tuple[object, Call, int, Callable, object]] = []

    def finish(chosen: list) -> None:
        for entry in order.sample(chosen, len(chosen)):
            work, call, number, pairs, _ = entry
            work.wait()
            _compare(call, number, pairs())
            pending.remove(entry)

    for number in range(calls):
        if draw.random() < 0.03 and len(groups) < 6:
            members = sorted(draw.sample(everyone, draw.randint(1, size)))
            groups.append((members, dist.new_group(members)))
        if draw.random() < 0.02 and len(groups) > 1:
            members, group = groups.pop(draw.randrange(1, len(groups)))
            if rank in members:
                finish([entry for entry in pending if entry[4] is group])
                dist.destroy_process_group(group)
        chosen = draw.randrange(len(groups))
        seed_of_call = draw.random()
        members, group = groups[chosen]
        if rank not in members:
            continue
        call = Call(random.Random(seed_of_call), number, members, rank)
        options = {"group": group, "async_op": call.asynchronous}
        work, pairs = OPERATIONS[call.name](call, options)
        if work is None:
            _compare(call, number, pairs())
        else:
            pending.append((work, call, number, pairs, group))
        if len(pending) > _IN_FLIGHT:
            finish(order.sample(pending, order.randint(1, _IN_FLIGHT)))
    finish(list(pending))


def main() -> None:
    """Run the long form."""
    import hvdkit.torch.distributed  # noqa: F401

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("hvd")
    for begin in range(0, options.calls, 500):
        calls = min(500, options.calls - begin)
        draw_calls(options.seed + begin, calls)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{begin + calls} calls are right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
