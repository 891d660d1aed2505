"""A tape that nobody wrapped trains another model on each rank: a warning, and no save."""

import contextlib

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import keras, tf

STEPS = 12


@contextlib.contextmanager
def warnings():
    """Yield the texts that are logged."""
    from hvdkit.tensorflow import unwrapped

    texts = []
    with pytest.MonkeyPatch.context() as patch, recorded("hvdkit") as log:
        # Earlier tests of this process may have changed these.
        patch.setattr(unwrapped, "_warned", False)
        patch.setattr(unwrapped, "_reduces_itself", False)
        yield texts
    texts += [record.getMessage() for record in log if "is slow:" not in record.getMessage()]


class Training:
    """A linear model, its optimizer, and a loop with a tape."""

    def __init__(self, hvd, tape, reduce=lambda gradients: gradients):
        keras.utils.set_random_seed(1)
        self.hvd, self.tape, self.reduce = hvd, tape, reduce
        # Keras' own names count the layers of this process, which earlier tests made; in a graph,
        # collectives are named after their tensors.
        self.model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, name="dense")], name="m"
        )
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)
        hvd.broadcast_variables(self.model.variables, root_rank=0)

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x) - 1.0) ** 2)
        variables = self.model.trainable_variables
        gradients = self.reduce(self.tape(tape).gradient(loss, variables))
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def train(self, in_graph):
        step = tf.function(self.step) if in_graph else self.step
        numbers = np.random.default_rng(self.hvd.rank())
        for _ in range(STEPS):
            step(tf.constant(numbers.normal(size=(4, 3)), tf.float32))

    @contextlib.contextmanager
    def checkpointer(self):
        with (
            shared_folder(self.hvd) as folder,
            self.hvd.Checkpointer(
                folder, model=self.model, optimizer=self.optimizer
            ) as checkpointer,
        ):
            yield checkpointer


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_tape_that_is_not_wrapped(hvd, tmp_path, in_graph):
    training = Training(hvd, lambda tape: tape)
    with warnings() as texts:
        training.train(in_graph)
    assert len(texts) == (hvd.rank() == 0)
    assert all("tape = hvd.DistributedGradientTape(tape)" in text for text in texts)
    with (
        contextlib.chdir(tmp_path),
        training.checkpointer() as checkpointer,
        pytest.raises(RankMismatchError, match=r"DistributedGradientTape\(tape\) was forgotten"),
    ):
        checkpointer.save(STEPS)


@pytest.mark.parametrize(
    ("how", "in_graph"), [("tape", True), ("allreduce", False), ("grouped allreduce", True)]
)
def test_gradients_that_are_reduced(hvd, how, in_graph):
    reduce = {
        "allreduce": lambda gradients: [hvd.allreduce(g) for g in gradients],
        "grouped allreduce": hvd.grouped_allreduce,
    }.get(how, lambda gradients: gradients)
    tape = hvd.DistributedGradientTape if how == "tape" else lambda tape: tape
    training = Training(hvd, tape, reduce)
    with warnings() as texts:
        training.train(in_graph)
    assert not texts
    with training.checkpointer() as checkpointer:
        checkpointer.save(STEPS)


@pytest.mark.parametrize(
    ("alike", "in_graph"), [("all", False), ("all", True), ("the first two", True), ("none", False)]
)
def test_ranks_that_train_the_same_data(hvd, in_graph, alike):
    """Two ranks with equal data in three steps are named; a single equal batch is chance."""
    # Only the first reductions with the same settings are compared.
    settings = 10_000 + 8 * len(alike) + 4 * in_graph
    training = Training(hvd, lambda t: hvd.DistributedGradientTape(t, bucket_bytes=settings))
    step = tf.function(training.step) if in_graph else training.step
    seed = {"all": 0, "the first two": max(hvd.rank() - 1, 0), "none": hvd.rank()}[alike]
    numbers, common = np.random.default_rng(seed), np.random.default_rng(9)
    with recorded("hvdkit") as log:
        step(tf.constant(common.normal(size=(4, 3)), tf.float32))
        for _ in range(4):
            step(tf.constant(numbers.normal(size=(4, 3)), tf.float32))
    texts = [r.getMessage() for r in log if "same gradients" in r.getMessage()]
    assert len(texts) == (alike != "none" and hvd.rank() == 0)
    ranks = range(hvd.size() if alike == "all" else 2)
    named = f"passes, ranks {', '.join(map(str, ranks))} computed the same gradients"
    assert all(named in text and "hvd.shard(dataset)" in text for text in texts)


def test_variables_that_each_rank_trains_for_itself(hvd):
    training = Training(hvd, lambda tape: tape)
    hvd.register_local(training.model)
    with warnings() as texts:
        training.train(True)
    assert not texts
    with training.checkpointer() as checkpointer:
        checkpointer.save(STEPS)


def test_layers_that_a_tape_does_not_reduce(hvd):
    training = Training(
        hvd,
        lambda tape: hvd.PartialDistributedGradientTape(
            tape, local_layers=training.model.layers[0]
        ),
    )
    with warnings() as texts:
        training.train(False)
    assert not texts
    with (
        shared_folder(hvd) as folder,
        hvd.Checkpointer(folder, model=training.model) as checkpointer,
    ):
        checkpointer.save(STEPS)


@pytest.mark.parametrize("given", [3, ["kernel"]])
def test_wrong_arguments_of_register_local(hvd, given):
    with pytest.raises(UsageError, match="register_local"):
        hvd.register_local(given)
