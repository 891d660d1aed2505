"""Bucket sizes of Keras and TensorFlow: one candidate in a run."""

import json
import os
import subprocess
import sys

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.reduction.compression import FORMATS
from hvdkit.reduction.plan import Reduction
from hvdkit.training import trial
from hvdkit.training.trial import BatchCount, TrialPlan, with_candidate
from hvdkit.training.tuning import Candidate
from hvdkit.tune import buckets
from hvdkit.tune.trials import Result
from tests.ranks.rank_pool import Configuration, skip_where_unsupported

MB = 1_000_000


class Runs:
    """Runs of a training whose steps take a time that depends on its settings.

    Args:
        gradient_bytes: the size of the gradients.
        ranks: the number of ranks.
    """

    def __init__(self, gradient_bytes=40 * MB, ranks=2):
        self.gradient_bytes, self.ranks = gradient_bytes, ranks
        self.made = []

    def run(self, plan, variables):
        kind = buckets.FLAT if variables[buckets.VARIABLE] else buckets.TWO_LEVEL
        size, name = plan.candidate or (25 * MB, "none")
        self.made.append((kind, size, name))
        reports = []
        for rank in range(self.ranks):
            # The last rank is the slowest.
            seconds = 0.1 + 0.01 * rank + (0.02 if kind == buckets.FLAT else 0)
            seconds *= 0.5 if size == 5 * MB else 1.0
            run = {"settings": [size, name], "gradient_bytes": self.gradient_bytes,
                   "seconds": seconds}  # fmt: skip
            reports.append({"rank": rank, "steps": 32, "run": run})
        return Result(10.0, reports)


def measure(runs, sizes=(5 * MB, 100 * MB), kinds=(buckets.TWO_LEVEL, buckets.FLAT), said=()):
    plan = TrialPlan(bucket_bytes=sizes)
    return buckets.measure(runs, plan, kinds, 3, list(said).append)


def test_each_candidate_has_a_run_in_each_turn():
    runs = Runs()
    found = measure(runs)
    assert found.chosen == (buckets.TWO_LEVEL, Candidate(5 * MB, "none"))
    assert found.current == (buckets.TWO_LEVEL, Candidate(25 * MB, "none"))
    # The first run shows the settings of the script.
    assert len(runs.made) == 1 + 3 * 2 * 3
    assert found.seconds[buckets.FLAT, Candidate(25 * MB, "none")] == pytest.approx([0.13] * 3)
    # The order changes with each turn.
    assert runs.made[1:7] == runs.made[12:6:-1]
    assert not found.fingerprints


def test_sizes_that_make_one_bucket_are_measured_once():
    runs = Runs(gradient_bytes=20 * MB)
    found = measure(runs)
    assert {each.bucket_bytes for _, each in found.seconds} == {5 * MB, 25 * MB}


def test_nothing_to_compare():
    with pytest.raises(HvdkitError, match="there is nothing to compare"):
        measure(Runs(gradient_bytes=MB), sizes=(100 * MB,), kinds=(buckets.FLAT,))


def test_one_rank_reduces_nothing():
    with pytest.raises(HvdkitError, match="there is only one rank"):
        measure(Runs(ranks=1))


@pytest.fixture
def requested(monkeypatch):
    """Return a function that puts a plan into the environment."""

    def put(plan):
        monkeypatch.setenv(trial.VARIABLE, plan.to_json())

    return put


def test_the_settings_of_a_run(requested):
    given = Reduction(FORMATS["fp16"]())
    assert with_candidate(given, lambda name: FORMATS[name]()) is given
    requested(TrialPlan(turns=3, candidate=(7, "bf16")))
    found = with_candidate(given, lambda name: FORMATS[name]())
    assert (found.bucket_bytes, found.format.name) == (7, "bf16")
    # A format of the script's own may have options.
    requested(TrialPlan(turns=3, candidate=(7, "fp16")))
    assert with_candidate(given, pytest.fail).format is given.format


def test_the_time_of_a_step_is_that_of_its_accumulation_window(capsys):
    now = [0.0]
    plan = TrialPlan(turns=1, turn_steps=3)
    count = BatchCount(plan, 1, window=2, clock=lambda: now[0])
    while not count.over:
        # Only the last batch of a window communicates.
        now[0] += 1.0 if count.made % 2 else 0.1
        count.add()
    assert count.made == 2 * (2 + 3)
    count.report(Reduction(FORMATS["none"]()), 8)
    report = json.loads(capsys.readouterr().out.strip().removeprefix(trial.MARK))
    assert report["run"]["seconds"] == pytest.approx(1.1)


def test_batches_that_end_together_with_the_first_ones_are_not_timed(capsys):
    """The first batches also trace the graph. `steps_per_execution` trains batches together."""
    now = [0.0]
    plan = TrialPlan(turns=3, turn_steps=10)
    count = BatchCount(plan, 1, clock=lambda: now[0])
    while not count.over:
        now[0] += 50 * 0.1 if count.made else 60.0
        count.add(50)
    count.report(Reduction(FORMATS["none"]()), 8)
    report = json.loads(capsys.readouterr().out.strip().removeprefix(trial.MARK))
    assert report["run"]["seconds"] == pytest.approx(0.1)


TAPE = """
import sys
import tensorflow as tf
import hvdkit.tensorflow as hvd

hvd.init()
weights = tf.Variable([1.0, 2.0])
other = tf.Variable(tf.ones(100))


def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights**2)
    (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weights])
    weights.assign_sub(0.1 * gradient)
    # A GAN has several tapes.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other**2)
    hvd.DistributedGradientTape(tape).gradient(loss, [other])


if sys.argv[1] == "fit":
    import keras
    import hvdkit.keras

    class Model(keras.Model):
        def train_step(self, data):
            step()
            return {"loss": tf.constant(0.0)}

    step_in_fit = Model()
    step_in_fit.compile()
step = tf.function(step) if sys.argv[1] == "graph" else step
try:
    for _ in range(1000):
        if sys.argv[1] == "fit":
            step_in_fit.fit(tf.zeros([8, 1]), batch_size=1, verbose=0)
        else:
            step()
finally:
    print("cleaned up")
print("not ended")
"""


@pytest.mark.parametrize(
    "mode",
    [
        "graph",
        pytest.param("eager", marks=pytest.mark.long),
        pytest.param("fit", marks=pytest.mark.long),
    ],
)
def test_a_tape_counts_its_steps_and_ends_the_script(mode, tmp_path):
    skip_where_unsupported(Configuration("tensorflow", "gloo", 1))
    plan = TrialPlan(turns=3, candidate=(5, "bf16"))
    done = subprocess.run(
        [sys.executable, "-c", TAPE, mode],
        env={**os.environ, trial.VARIABLE: plan.to_json(), "TF_CPP_MIN_LOG_LEVEL": "3",
             "KERAS_BACKEND": "tensorflow"},
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in done.stdout.splitlines() if each.startswith(trial.MARK)]
    report = json.loads(line.removeprefix(trial.MARK))
    assert report["steps"] == 2 + 3 * 10
    assert report["run"]["settings"] == [5, "bf16"]
    assert report["run"]["gradient_bytes"] == 400
    assert "cleaned up" in done.stdout
    assert "not ended" not in done.stdout
