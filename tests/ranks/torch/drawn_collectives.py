"""Collectives that are drawn at random, compared with NumPy.

    python -m tests.ranks.torch.drawn_collectives SEED DRAWS LARGEST

runs on every rank of a job. LARGEST is the size of the largest tensor in bytes. Each draw is a
batch of collectives in flight: a collective, a dtype, sizes, an operation and factors, of all ranks
or of a process set. One of eight batches has a large tensor. In some batches one rank is stopped
again and again, so that it reads late. Some inputs are in the shared memory of the host, as buckets
are. Some collectives are in place. Each other input is overwritten as soon as its collective has
ended. Names are used again, with other shapes and kinds.

Values are small whole numbers and factors are powers of two, so that all sums are exact in every
order.
"""

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

KINDS = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
KINDS += ("grouped_allreduce", "grouped_reducescatter", "grouped_allgather")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int32, torch.int64)
OTHER = (torch.int8, torch.uint8, torch.int16)  # not for reductions

#: Of a tensor of one rank.
MOST_NUMBERS = 1 << 24
_POOL = np.random.default_rng(11).integers(-8, 9, MOST_NUMBERS + 4096, np.int8)


@dataclass(frozen=True)
class Draw:
    """One collective. `seed` determines the values of all ranks.

    Attributes:
        kind: the name of hvdkit's function, without `_async`.
        rows: the rows of each tensor: one for each rank of the process set.
        width: the numbers in a row.
        ranks: the number of ranks of the process set.
    """

    kind: str
    dtype: torch.dtype
    rows: tuple[tuple[int, ...], ...]
    width: int
    op: str
    prescale: float
    postscale: float
    ranks: int
    root: int
    seed: int

    def values(self, tensor: int, rank: int) -> np.ndarray:
        """Return the rows of one rank, as small whole numbers."""
        size = self.rows[tensor][rank] * self.width
        begin = (self.seed * 31 + tensor * 1009 + rank * 401) % 4096
        numbers = _POOL[begin : begin + size].reshape(-1, self.width)
        if self.op == "Product":
            return np.where(numbers > 0, np.int8(2), np.int8(-1) if self.signed else np.int8(1))
        return numbers if self.signed else np.abs(numbers)

    @property
    def in_place(self) -> bool:
        return self.kind in ("allreduce", "grouped_allreduce", "broadcast") and self.seed % 2 == 0

    @property
    def signed(self) -> bool:
        return self.dtype != torch.uint8

    def own(self, tensor: int, rank: int) -> torch.Tensor:
        """Return the tensor of one rank."""
        return torch.from_numpy(self.values(tensor, rank).copy()).to(self.dtype)

    def splits(self, rank: int) -> list[int]:
        """Return how many rows a rank sends to each rank in an alltoall."""
        rng = np.random.default_rng([self.seed, rank])
        cuts = np.sort(rng.integers(0, self.rows[0][rank] + 1, self.ranks - 1))
        return np.diff([0, *cuts, self.rows[0][rank]]).tolist()

    @property
    def factor(self) -> float:
        """The factor of a sum."""
        return self.prescale * self.postscale / (self.ranks if self.op == "Average" else 1)

    def total(self, tensor: int, rank: int) -> np.ndarray:
        """Return the result on one rank without the factor, as whole numbers."""
        if self.kind == "broadcast":
            return self.values(tensor, self.root)
        everyone = (self.values(tensor, r) for r in range(self.ranks))
        if self.kind == "alltoall":
            return np.concatenate(
                [
                    numbers[sum((s := self.splits(r))[:rank]) : sum(s[: rank + 1])]
                    for r, numbers in enumerate(everyone)
                ]
            )
        if "allgather" in self.kind:
            return np.concatenate(list(everyone))
        if "reducescatter" in self.kind:
            count, rest = divmod(self.rows[tensor][0], self.ranks)
            begin = rank * count + min(rank, rest)
            everyone = (v[begin : begin + count + (rank < rest)] for v in everyone)
        combine = {"Max": np.maximum, "Min": np.minimum, "Product": np.multiply}
        total = next(everyone).astype(np.int16)
        for numbers in everyone:
            combine.get(self.op, np.add)(total, numbers, out=total)
        return total

    def check(self, tensor: int, rank: int, result: torch.Tensor) -> bool:
        """Return whether a result is right."""
        total = torch.from_numpy(self.total(tensor, rank))
        if result.shape != total.shape or result.dtype != self.dtype:
            return False
        if self.factor == 1.0:
            return torch.equal(result, total.to(self.dtype))
        if math.frexp(self.factor)[0] == 0.5:
            return torch.equal(result, total.to(self.dtype).mul_(self.factor))
        tolerance = 2 * torch.finfo(self.dtype).eps
        return torch.allclose(result.double(), total.double() * self.factor, rtol=tolerance, atol=0)


def draw(rng: np.random.Generator, ranks: int, least: float, largest: float) -> Draw:
    """Draw a collective of `ranks` ranks, the same on all ranks.

    Args:
        least: the fewest bytes of its first tensor.
        largest: the most bytes of its first tensor. Further tensors of a group are smaller.
    """
    kind = str(rng.choice(KINDS, p=[0.2, 0.25, 0.1, 0.05, 0.1, 0.1, 0.1, 0.1]))
    reduces = "reduce" in kind
    dtypes = (*FLOATS, *WHOLE, *(() if reduces else OTHER))
    dtype = dtypes[rng.integers(len(dtypes))]
    width = int(rng.choice([1, 3, 64]))
    rows = []
    for _ in range(int(rng.integers(2, 6)) if "grouped" in kind else 1):
        size = least * (largest / least) ** rng.random()
        least, largest = 4, 1 << 16
        most = min(max(int(size / dtype.itemsize / width), 1), MOST_NUMBERS // width)
        if "allgather" in kind or kind == "alltoall":
            rows.append(tuple(int(most * rng.choice([0, 0.3, 1])) for _ in range(ranks)))
        else:
            rows.append((most,) * ranks)
    ops = ["Sum", "Average"] if dtype in FLOATS else ["Sum"]
    if "allreduce" in kind:
        ops += ["Max", "Min", "Product"]
    op = str(rng.choice(ops)) if reduces else ""
    scales = reduces and op in ("Sum", "Average") and dtype in FLOATS
    return Draw(
        kind,
        dtype,
        tuple(rows),
        width,
        op,
        float(rng.choice([1, 1, 0.5, 2])) if scales else 1.0,
        float(rng.choice([1, 1, 0.25, 4])) if scales else 1.0,
        ranks,
        int(rng.integers(ranks)),
        int(rng.integers(1 << 30)),
    )


@contextlib.contextmanager
def reading_late() -> Iterator[None]:
    """Stop this process for 30 ms again and again, so that it reads its messages late."""
    # At the end, the process continues, also if it has just been stopped.
    script = "trap 'kill -CONT $0; exit' TERM; while kill -CONT $0; do sleep 0.05; kill -STOP $0; "
    script += "sleep 0.03; done"
    with subprocess.Popen(["sh", "-c", script, str(os.getpid())]) as stopping:
        try:
            yield
        finally:
            stopping.terminate()


def placed(tensor: torch.Tensor, shared: bool) -> torch.Tensor:
    """Return the tensor, or a copy in the shared memory of the host."""
    if not shared or not tensor.numel():
        return tensor
    from hvdkit.torch import shared_memory

    flat = shared_memory.empty(tensor.numel(), tensor.dtype)
    return flat.copy_(tensor.reshape(-1)).view(tensor.shape)


def submit(hvd, call, tensors, name, process_set, members):
    """Start a collective of this rank's `tensors`. Return a handle."""
    arguments = {"name": name, "process_set": process_set}
    if call.op:
        arguments["op"] = getattr(hvd, call.op)
        arguments["prescale_factor"] = call.prescale
        arguments["postscale_factor"] = call.postscale
    if call.kind == "broadcast":
        arguments["root_rank"] = members[call.root]
    if call.kind == "alltoall":
        splits = call.splits(members.index(hvd.rank()))
        arguments["splits"] = torch.tensor(splits, dtype=torch.int32)
    start = getattr(hvd, f"{call.kind}_async{'_' * call.in_place}")
    return start(tensors if "grouped" in call.kind else tensors[0], **arguments)


def check_bits(hvd, rng, process_set, members, name):
    """Return whether reducescatter and allreduce of noise have the same bits."""
    dtype = FLOATS[rng.integers(4)]
    size = int(rng.integers(65536, 2_000_000)) // dtype.itemsize + 64
    seed, average = int(rng.integers(1 << 30)), bool(rng.integers(2))
    if hvd.rank() not in members:
        return True
    op = hvd.Average if average else hvd.Sum
    generator = torch.Generator().manual_seed(seed + hvd.rank())
    own = torch.randn(size, generator=generator).to(dtype)
    part = hvd.reducescatter(own, op=op, name=f"{name}.part", process_set=process_set)
    total = hvd.allreduce(own, op=op, name=f"{name}.all", process_set=process_set)
    count, rest = divmod(size, len(members))
    rank = members.index(hvd.rank())
    begin = rank * count + min(rank, rest)
    return torch.equal(part, total[begin : begin + len(part)])


def run(hvd, seed: int, draws: int, largest: int) -> list[str]:
    """Run `draws` batches on all ranks. Return the wrong results of this rank."""
    wrong = []
    size = hvd.size()
    chosen = [[0, size - 1], list(range(1, size))] if size > 2 else []
    sets = [(hvd.global_process_set, list(range(size)))]
    sets += [(hvd.add_process_set(ranks), ranks) for ranks in chosen]
    with contextlib.ExitStack() as late:
        for number in range(draws):
            rng = np.random.default_rng([seed, number])
            if number % 10 == 0:
                late.close()
                if rng.integers(2) and rng.integers(size) == hvd.rank():
                    late.enter_context(reading_late())
            process_set, members = sets[int(rng.choice(len(sets)))]
            if rng.random() < 0.1:
                if not check_bits(hvd, rng, process_set, members, f"{number}"):
                    wrong.append(f"draw {number}: other bits, {members}")
                continue
            batch = [draw(rng, len(members), 4, largest / 16) for _ in range(rng.integers(1, 5))]
            if number % 8 == 0:
                batch[0] = draw(rng, len(members), largest / 16, largest)
            if hvd.rank() not in members:
                continue
            rank = members.index(hvd.rank())
            of_rank = np.random.default_rng([seed, number, rank])
            inputs = [
                [placed(c.own(k, rank), of_rank.random() < 0.5) for k in range(len(c.rows))]
                for c in batch
            ]
            # Horovod never fuses tensors whose names begin with hvdkit.
            names = [
                f"{'hvdkit.' * (c.seed % 3 == 0 and 'grouped' not in c.kind)}{number % 5}.{k}"
                for k, c in enumerate(batch)
            ]
            # Each rank submits them in another order.
            handles = {
                k: submit(hvd, batch[k], inputs[k], names[k], process_set, members)
                for k in of_rank.permutation(len(batch))
            }
            for k, call in enumerate(batch):
                result = hvd.synchronize(handles[k])
                for each in [] if call.in_place else inputs[k]:
                    each.fill_(100)
                if call.kind == "alltoall":
                    result = result[0]
                results = result if "grouped" in call.kind else [result]
                for tensor, each in enumerate(results):
                    if not call.check(tensor, rank, each):
                        wrong.append(f"draw {number}: tensor {tensor} of {call}, ranks {members}")
    for process_set, _ in sets[1:]:
        hvd.remove_process_set(process_set)
    return wrong


def check(outputs: Sequence[str], draws: int) -> None:
    """Check what the ranks have written. Many names also cause a warning about Horovod's cache."""
    assert {output.splitlines()[-1] for output in outputs} == {f"{draws} draws are right"}, outputs


if __name__ == "__main__":
    import hvdkit.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    found = run(hvd, *map(int, sys.argv[1:]))
    print("\n".join(found) or f"{sys.argv[2]} draws are right", flush=True)
    hvd.shutdown()
    sys.exit(bool(found))
