"""The examples of docs/workloads.md on one, two and four ranks: figures, losses and resume."""

import importlib.util
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hvdkit.checkpoint.store import Store
from tests.logs import without_slow_ranks
from tests.ranks.rank_pool import Configuration, start_ranks_of
from tests.ranks.tensorflow.test_digits import QUIET, example

SECONDS = 600  # for one run


@dataclass(frozen=True)
class Workload:
    """An example, and what is expected of it.

    Attributes:
        script: the name of the script.
        framework: the framework of `Configuration`.
        least, most: the range of the final figure.
        apart: the largest difference of the figure between 1, 2 and 4 ranks.
        exact: arguments with which any number of ranks has the same losses.
        rounding: the largest relative difference of these losses; None: no losses are the same.
        short: arguments for a run of a few checkpoints.
    """

    script: str
    framework: str = "torch"
    least: float = 0.0
    most: float = 1.0
    apart: float = 0.01
    exact: str = ""
    rounding: float | None = 1e-4
    short: str = ""

    def __str__(self) -> str:
        return f"{self.script}-{self.framework}"


WORKLOADS = [
    # In bfloat16, each number of ranks rounds the gradients differently.
    Workload(
        "torch_gpt",
        least=2.4,
        most=3.2,
        apart=0.3,
        exact="--float32 --megabytes 0.1",
        short="--megabytes 0.15 --checkpoint-every 5",
    ),
    Workload("torch_bert", least=0.2, exact="--epochs 1", short="--epochs 1 --checkpoint-every 10"),
    Workload(
        "torch_images",
        least=0.97,
        exact="--float64 --images 1280 --epochs 1",
        short="--images 3200 --epochs 1 --checkpoint-every 5",
    ),
    Workload(
        "torch_gan",
        least=0.7,
        apart=0.15,
        exact="--steps 200",
        rounding=1e-3,
        short="--steps 600 --checkpoint-every 50",
    ),
    Workload(
        "torch_cartpole",
        least=400,
        most=500,
        apart=100,
        exact="--steps 10",
        short="--steps 20 --checkpoint-every 2",
    ),
    Workload(
        "torch_recommender",
        least=0.8,
        exact="--pairs 204800 --epochs 1",
        short="--pairs 204800 --checkpoint-every 10",
    ),
    Workload(
        "torch_morse",
        most=0.1,
        apart=0.05,
        # Every second batch has 5 signals: other numbers on each rank.
        exact="--signals 37 --epochs 10",
        short="--signals 670 --epochs 1 --checkpoint-every 4",
    ),
    *(
        workload
        for framework in ("keras-tensorflow", "keras-torch")
        for workload in (
            Workload(
                "keras_gpt",
                framework,
                least=2.4,
                most=3.2,
                apart=0.3,
                exact="--float32 --megabytes 0.1 --epochs 2",
                short="--megabytes 0.15 --checkpoint-every 10",
            ),
            Workload(
                "keras_bert",
                framework,
                least=0.25,
                exact="--maskings 1 --epochs 2",
                short="--maskings 1 --epochs 1 --checkpoint-every 10",
            ),
            # The augmentation depends on the number of ranks.
            Workload(
                "keras_images",
                framework,
                least=0.9,
                apart=0.05,
                rounding=None,
                short="--images 3200 --epochs 1 --checkpoint-every 5",
            ),
        )
    ),
]
EVERY = pytest.mark.parametrize("workload", WORKLOADS, ids=str)


def start(workload, ranks, folder, arguments=""):
    if workload.script == "torch_cartpole" and importlib.util.find_spec("gymnasium") is None:
        pytest.skip("needs gymnasium, of the extra examples")
    script = example(workload.script)
    command = [sys.executable, script, "--checkpoint-dir", str(folder), *arguments.split()]
    # A killed TensorFlow leaves files with generated code there.
    environment = QUIET | {"TMPDIR": str(folder.parent)}
    return start_ranks_of(Configuration(workload.framework, "gloo", ranks), command, environment)


def run(workload, ranks, folder, arguments=""):
    """Return the output of rank 0; all other ranks must be silent."""
    results = start(workload, ranks, folder, arguments).wait(timeout=SECONDS)
    first, *others = [without_slow_ranks(result.output) for result in results]
    assert others == [""] * (ranks - 1)
    return first


def figure_of(output, ranks):
    found = re.search(rf"^\w+=(\d+\.\d+) on {ranks} ranks$", output, re.M)
    assert found, output
    return float(found[1])


def losses_of(output):
    found = re.findall(r"^(?:step|epoch) \d+ (?:loss|mean return) (\S+)$", output, re.M)
    assert found, output
    return [float(loss) for loss in found]


def final_tensors(folder):
    """Return the files with the tensors of the last checkpoint."""
    last = Path(Store(folder).steps()[-1].location)
    found = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert found
    return found


@pytest.mark.long
@EVERY
def test_the_figure_is_that_of_one_rank(workload, tmp_path):
    outputs = {ranks: run(workload, ranks, tmp_path / str(ranks)) for ranks in (1, 2, 4)}
    figures = {ranks: figure_of(output, ranks) for ranks, output in outputs.items()}
    assert workload.least <= min(figures.values()), figures
    assert max(figures.values()) <= workload.most, figures
    assert max(figures.values()) - min(figures.values()) <= workload.apart, figures


@pytest.mark.long
@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w.rounding is not None], ids=str)
def test_the_losses_are_those_of_one_rank(workload, tmp_path):
    losses = {r: losses_of(run(workload, r, tmp_path / str(r), workload.exact)) for r in (1, 2, 4)}
    for ranks in (2, 4):
        assert losses[ranks] == pytest.approx(losses[1], rel=workload.rounding), losses


@pytest.mark.long
@EVERY
def test_a_killed_run_resumes_to_the_same_end(workload, tmp_path):
    whole = run(workload, 2, tmp_path / "whole", workload.short)
    folder = tmp_path / "killed"
    deadline = time.monotonic() + SECONDS
    with start(workload, 2, folder, workload.short) as group:
        while not Store(folder).steps():
            assert group.running(), group.output(0)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for process in group._group.started:
            process.kill()
    saved = Store(folder).steps()[-1].step
    assert saved < Store(tmp_path / "whole").steps()[-1].step
    resumed = run(workload, 2, folder, f"{workload.short} --resume")
    assert re.search(rf"resum.* {saved}\b", resumed), resumed
    assert figure_of(resumed, 2) == figure_of(whole, 2)
    assert final_tensors(folder) == final_tensors(tmp_path / "whole")


@pytest.mark.long
def test_a_divided_table_resumes_on_another_number_of_ranks(tmp_path):
    recommender = next(w for w in WORKLOADS if w.script == "torch_recommender")
    short = "--pairs 16384 --checkpoint-every 4"
    whole = run(recommender, 2, tmp_path / "whole", f"{short} --epochs 2")
    moved = tmp_path / "moved"
    run(recommender, 2, moved, f"{short} --epochs 1")
    again = run(recommender, 1, moved, f"{short} --epochs 2 --resume")
    assert "resumed after step 8" in again
    assert figure_of(again, 1) == pytest.approx(figure_of(whole, 2), abs=2e-4)
    tables = [
        load_file(Path(Store(folder).steps()[-1].location) / "sharded.safetensors")
        for folder in (tmp_path / "whole", moved)
    ]
    # The rows, and Adagrad's sums of their squared gradients.
    assert tables[0].keys() == tables[1].keys() == {"table", "table.sum"}
    for name in tables[0]:
        assert tables[1][name] == pytest.approx(tables[0][name], rel=1e-3, abs=1e-6), name


@pytest.mark.long
def test_a_gan_with_two_optimizers(tmp_path):
    gan = next(w for w in WORKLOADS if w.script == "torch_gan")
    folder = tmp_path / "gan"
    output = run(gan, 2, folder, "--steps 100 --checkpoint-every 40")
    assert losses_of(output) == [pytest.approx(1.39, abs=0.3)]
    assert 0 <= figure_of(output, 2) <= 1
    first, *_, last = (Path(step.location) for step in Store(folder).steps())
    for model in ("generator", "discriminator", "average"):
        name = f"model-{model}.safetensors"
        assert (first / name).read_bytes() != (last / name).read_bytes(), model
