"""Compare how well models train with each wire format, over several seeds.

`scripts/bench_accuracy` calls `main`, which starts two jobs: one with hvdkit's formats, one with
those of DistributedDataParallel. Each rank runs the script again, which then calls `rank_main`.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hvdkit.bench.figures import wide_console
from hvdkit.system.owned_folders import TemporaryFolder
from hvdkit.system.processes import python_command
from hvdkit.system.whole_files import replacing

if TYPE_CHECKING:
    import torch

#: Wire formats of hvdkit, and communication hooks of DistributedDataParallel.
HVDKIT = ("fp32", "fp16", "int8")
DDP = ("powersgd",)

_JOB_SECONDS = 3600
#: The root of the checkout. `Digits` imports a script from its folder `examples`.
_REPOSITORY = Path(__file__).resolve().parents[2]


def main(description: str) -> int:
    """Run the command line. Return the exit status.

    Args:
        description: of the script, for `--help`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--seeds", type=int, default=10, help="trainings of each format, at least 2 (default: 10)"
    )
    parser.add_argument(
        "--tasks", default="digits,transformer", help="names, separated by a comma (default: both)"
    )
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    if options.seeds < 2:
        # One value has no standard deviation.
        parser.error(f"--seeds is {options.seeds}: expected at least 2")
    with TemporaryFolder("hvdkit-accuracy-") as folder:
        results = [
            result
            for optimizer in ("hvdkit", "ddp")
            for result in _run(optimizer, options, Path(folder))
        ]
    if options.json:
        with replacing(options.json) as draft:
            draft.write_text(json.dumps(results))
    _show(results, options.ranks)
    return 0


def _run(optimizer: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    out = folder / f"{optimizer}.json"
    spec = {
        "optimizer": optimizer,
        "out": str(out),
        "store": str(folder / "store"),
        "seeds": options.seeds,
        "tasks": options.tasks.split(","),
    }
    # With shared memory, ranks of one host would not send the wire format.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HVDKIT_COLLECTIVES": "flat"}
    script = [sys.executable, sys.argv[0], "--rank", json.dumps(spec)]
    command = python_command("-m", "hvdkit", "run", "-np", str(options.ranks), *script)
    subprocess.run(command, env=environment, cwd=_REPOSITORY, timeout=_JOB_SECONDS, check=True)
    results: list[dict[str, Any]] = json.loads(out.read_text())
    return results


def _show(results: Sequence[Mapping[str, Any]], ranks: int) -> None:
    table = Table(title=f"{ranks} ranks: metric on held-out data, mean and standard deviation")
    for column in ("task", "metric", "wire"):
        table.add_column(column)
    for column in ("mean", "standard deviation", "worse than fp32 by (in deviations)", "ms a step"):
        table.add_column(column, justify="right")
    for task in dict.fromkeys(result["task"] for result in results):
        of_task = [result for result in results if result["task"] == task]
        plain = [result["value"] for result in of_task if result["wire"] == "fp32"]
        for wire in dict.fromkeys(result["wire"] for result in of_task):
            chosen = [result for result in of_task if result["wire"] == wire]
            values = [result["value"] for result in chosen]
            sign = 1 if chosen[0]["metric"] == "loss" else -1
            worse = sign * (statistics.mean(values) - statistics.mean(plain))
            table.add_row(
                task,
                chosen[0]["metric"],
                wire,
                f"{statistics.mean(values):.4f}",
                f"{statistics.stdev(values):.4f}",
                f"{worse / statistics.stdev(plain):+.2f}",
                f"{statistics.median(result['ms'] for result in chosen):.1f}",
            )
    wide_console().print(table)


# --- a rank -------------------------------------------------------------------------------------

Batches = Iterator[tuple["torch.Tensor", "torch.Tensor"]]


class Digits:
    """A convolutional network on scikit-learn's handwritten digits."""

    name, metric, steps = "digits", "accuracy", 150

    def __init__(self) -> None:
        sys.path.append(str(_REPOSITORY / "examples"))
        import torch_digits  # type: ignore[import-not-found]

        self._example = torch_digits
        self._data = torch_digits.load_data()

    def model(self) -> "torch.nn.Module":
        """Return the model of the example."""
        return self._example.DigitNet()

    def optimizer(self, parameters: Any) -> "torch.optim.Optimizer":
        """Return SGD with momentum."""
        import torch

        return torch.optim.SGD(parameters, lr=0.04, momentum=0.9)

    def batches(self, seed: int, rank: int, ranks: int) -> Batches:
        """Yield this rank's batches."""
        import torch

        images, labels, *_ = self._data
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(images), generator=generator)[rank::ranks]
            for chosen in order.split(64):
                yield images[chosen], labels[chosen]

    def evaluate(self, model: "torch.nn.Module") -> float:
        """Return the accuracy on the test images."""
        *_, images, labels = self._data
        return float((model(images).argmax(1) == labels).double().mean())


class Transformer:
    """A language model of bytes, on the source code of Python's standard library."""

    name, metric, steps = "transformer", "loss", 300
    width, length, rows = 128, 64, 16

    def __init__(self) -> None:
        import torch

        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127).long()
        self._train, self._test = (
            content[: len(content) * 9 // 10],
            content[len(content) * 9 // 10 :],
        )

    def model(self) -> "torch.nn.Module":
        """Return a transformer with two layers and causal attention."""
        import torch
        from torch import nn

        length, width = self.length, self.width

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bytes = nn.Embedding(128, width)
                self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
                layer = nn.TransformerEncoderLayer(
                    width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
                )
                self.layers = nn.TransformerEncoder(
                    layer, 2, nn.LayerNorm(width), enable_nested_tensor=False
                )
                self.scores = nn.Linear(width, 128)
                self.mask = nn.Transformer.generate_square_subsequent_mask(length)

            def forward(self, text: torch.Tensor) -> torch.Tensor:
                hidden = self.bytes(text) + self.positions
                scores: torch.Tensor = self.scores(self.layers(hidden, self.mask, is_causal=True))
                return scores.transpose(1, 2)

        return Model()

    def optimizer(self, parameters: Any) -> "torch.optim.Optimizer":
        """Return AdamW."""
        import torch

        return torch.optim.AdamW(parameters, lr=2e-3)

    def batches(self, seed: int, rank: int, ranks: int) -> Batches:
        """Yield this rank's rows of text, and the same rows shifted by one byte."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(
                len(self._train) - self.length - 1, (self.rows * ranks,), generator=generator
            )
            yield self._rows(self._train, starts[rank::ranks])

    def evaluate(self, model: "torch.nn.Module") -> float:
        """Return the mean cross-entropy per byte of 400 rows, in nats."""
        import torch
        from torch.nn.functional import cross_entropy

        starts = torch.arange(400) * ((len(self._test) - self.length - 1) // 400)
        text, following = self._rows(self._test, starts)
        return float(cross_entropy(model(text), following))

    def _rows(
        self, content: "torch.Tensor", starts: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        rows = content[starts[:, None] + self._span()]
        return rows[:, :-1], rows[:, 1:]

    def _span(self) -> "torch.Tensor":
        import torch

        return torch.arange(self.length + 1)


TASKS: Mapping[str, Callable[[], Digits | Transformer]] = {
    "digits": Digits,
    "transformer": Transformer,
}


def rank_main(spec: Mapping[str, Any]) -> None:
    """Train all models of one job; rank 0 writes the results."""
    rank, ranks, wires, wrap = _start(spec)
    results = []
    for name in spec["tasks"]:
        task = TASKS[name]()
        for seed in range(spec["seeds"]):
            for wire in wires:
                value, seconds = _train(task, seed, rank, ranks, functools.partial(wrap, wire))
                results.append(
                    {
                        "task": name,
                        "metric": task.metric,
                        "wire": wire,
                        "seed": seed,
                        "value": value,
                        "ms": seconds * 1e3,
                    }
                )
                if rank == 0:
                    print(f"{name}, seed {seed}, {wire}: {value:.4f}", file=sys.stderr, flush=True)
    if rank == 0:
        Path(spec["out"]).write_text(json.dumps(results))


def _start(spec: Mapping[str, Any]) -> tuple[int, int, Sequence[str], Any]:
    """Join the job. Return rank, ranks, wire formats, and a function that wraps an optimizer."""
    if spec["optimizer"] == "hvdkit":
        import hvdkit.torch as hvd

        hvd.init()

        def wrap(wire: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            compression = "none" if wire == "fp32" else wire
            named = model.named_parameters()
            return model, hvd.DistributedOptimizer(optimizer, named, compression=compression)

        return hvd.rank(), hvd.size(), HVDKIT, wrap

    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=ranks
    )

    def wrap_ddp(wire: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
        assert wire == "powersgd"
        # One bucket: with several, the hook's collectives over Gloo are mixed up between ranks.
        module = DistributedDataParallel(model, bucket_cap_mb=1000)
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=10)
        module.register_comm_hook(state, powersgd.powerSGD_hook)
        return module, optimizer

    return rank, ranks, DDP, wrap_ddp


def _train(
    task: Digits | Transformer,
    seed: int,
    rank: int,
    ranks: int,
    wrap: Callable[[Any, Any], tuple[Any, Any]],
) -> tuple[float, float]:
    """Return the metric after training, and the median time of a step in seconds."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(seed)
    model = task.model()
    wrapped, optimizer = wrap(model, task.optimizer(model.parameters()))
    torch.manual_seed(1000 * seed + rank)  # dropout
    batches = task.batches(seed, rank, ranks)
    seconds = []
    for _ in range(task.steps):
        inputs, targets = next(batches)
        began = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    model.eval()
    with torch.no_grad():
        return task.evaluate(model), statistics.median(seconds)
