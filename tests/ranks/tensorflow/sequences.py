"""Sequences of user actions with gradient tapes, compared with one process with all data.

A sequence is a list of pairs (name of an action, number). All ranks get the same list; an action
derives everything random from the number, so ranks agree on which of them does what. The reference
is a copy of the variables on every rank, whose gradients are computed from all ranks' batches.
After every action, gradients and variables must have the same bits on all ranks, and be near those
of the reference.

Add an action: write a function and decorate it with `action`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ranks.actions import Actions
from tests.ranks.frameworks import keras, tf

INPUTS, HIDDEN, WORDS = 4, 5, 7

#: Relative error of one rounding on the wire; of int8, relative to the largest number.
ROUNDING = {"none": 1e-14, "fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}

#: The parts of the model that a batch can use.
PARTS = ("all", "branch", "unscaled", "words", "twice")


@dataclass(frozen=True)
class Setting:
    """The arguments of the tape, and the kind of variables.

    Attributes:
        compression: the wire format.
        average: `Average`, else `Sum`.
        bucket_bytes: small, so that there are several buckets.
        groups: the number of buckets; 0: any.
        sparse_as_dense: reduce the embedding's gradient as a dense one.
        variables: "tensorflow", or "keras": variables of Keras.
        optimizer: "none": subtract the gradients, or an optimizer of Keras.
        check_parameters: compare values and times.
        members: reduce over a process set without rank 1.
        on_nonfinite: "ignore" or "raise".
    """

    compression: str = "none"
    average: bool = True
    bucket_bytes: int = 100
    groups: int = 0
    sparse_as_dense: bool = False
    variables: str = "tensorflow"
    optimizer: str = "none"
    check_parameters: bool = True
    members: bool = False
    on_nonfinite: str = "ignore"


class World:
    """The state of a sequence on one rank."""

    def __init__(self, hvd: Any, setting: Setting) -> None:
        self.hvd = hvd
        self.setting = setting
        self.ranks = list(range(hvd.size()))
        self.process_set = hvd.global_process_set
        if setting.members and hvd.size() > 2:
            self.ranks.remove(1)
            self.process_set = _set_of(hvd, self.ranks)
        self.variables = self.make("own")
        self.reference = self.make("reference")
        self.functions: dict[Any, Any] = {}
        self.optimizer, self.plain = self.make_optimizer(), self.make_optimizer()

    def make(self, prefix: str) -> dict[str, Any]:
        """Return variables by name, the same on every rank."""
        shapes = {
            "w1": (INPUTS, HIDDEN),
            "b1": (HIDDEN,),
            "words": (WORDS, INPUTS),
            "w2": (HIDDEN, 2),
            "branch": (HIDDEN, 2),
            "scale": (),
        }
        draw = np.random.default_rng(3)
        values = {name: draw.normal(size=shape) for name, shape in shapes.items()}
        if self.setting.variables == "keras":
            return {
                name: keras.Variable(value, dtype="float64", name=f"{prefix}_{name}")
                for name, value in values.items()
            }
        # Without names, as many scripts.
        return {name: tf.Variable(value, dtype="float64") for name, value in values.items()}

    def make_optimizer(self) -> Any:
        if self.setting.optimizer == "none":
            return None
        # Adam would enlarge the differences of rounding.
        return keras.optimizers.SGD(0.05, momentum=0.9)

    def batch(self, number: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and the words of a rank's batch. Their lengths differ between ranks."""
        draw = np.random.default_rng(1000 * number + rank)
        rows, words = 1 + (number + rank) % 3, (number // 3 + 2 * rank) % 5
        return draw.normal(size=(rows, INPUTS)), draw.integers(0, WORDS, words)

    def parts(self, number: int, differ: bool) -> list[str]:
        """Return the part of the model that each rank uses."""
        draw = random.Random(number)
        if differ:
            return [draw.choice(PARTS) for _ in range(self.hvd.size())]
        return [draw.choice(PARTS)] * self.hvd.size()

    def wrap(self, tape: Any, **options: Any) -> Any:
        given: dict[str, Any] = {
            "compression": self.compression,
            "op": self.hvd.Average if self.setting.average else self.hvd.Sum,
            "bucket_bytes": self.setting.bucket_bytes,
            "groups": self.setting.groups or None,
            "sparse_as_dense": self.setting.sparse_as_dense,
            "check_parameters": self.setting.check_parameters,
            "process_set": self.process_set,
            "on_nonfinite": self.setting.on_nonfinite,
        }
        return self.hvd.DistributedGradientTape(tape, **(given | options))

    @property
    def compression(self) -> Any:
        if self.setting.compression != "int8":
            return self.setting.compression
        # The gradients are small, and would be sent as bfloat16.
        return self.hvd.Int8(as_bf16=_never)

    def function(self, key: Any, make: Callable[[], Callable[..., Any]]) -> Any:
        """Return the `tf.function` of this key, made once in a sequence."""
        if key not in self.functions:
            self.functions[key] = tf.function(make())
        return self.functions[key]

    def expected(
        self, losses: Sequence[Callable[[dict[str, Any]], Any]], names: Sequence[str] = ()
    ) -> tuple[dict[str, Any], float]:
        """Return the reduced gradients of losses, one for each rank, and the largest element.

        A gradient is None if no rank has one.
        """
        names = names or list(self.reference)
        sources = [self.reference[name] for name in names]
        total: dict[str, Any] = dict.fromkeys(names)
        largest = 0.0
        for loss in losses:
            with tf.GradientTape() as tape:
                value = loss(self.reference)
            for name, found in zip(names, tape.gradient(value, sources), strict=True):
                if found is not None:
                    dense = dense_of(found)
                    largest += float(np.max(np.abs(dense), initial=0.0))
                    total[name] = dense if total[name] is None else total[name] + dense
        if self.setting.average:
            total = {k: v if v is None else v / len(losses) for k, v in total.items()}
        return total, largest

    def losses(self, number: int, parts: Sequence[str]) -> list[Callable[[dict[str, Any]], Any]]:
        """Return the loss of each rank in the process set, as a function of the variables."""

        def loss(rank: int) -> Callable[[dict[str, Any]], Any]:
            return lambda variables: loss_of(variables, *self.batch(number, rank), parts[rank])

        return [loss(rank) for rank in self.ranks]

    def compare(
        self, found: dict[str, Any], expected: dict[str, Any], largest: float, factor: float = 1.0
    ) -> None:
        """Compare reduced gradients with those of the ranks and of the reference.

        Args:
            largest: the largest element of the ranks' gradients.
            factor: further factor of the permitted difference.
        """
        if self.hvd.rank() not in self.ranks:
            return
        n = len(self.ranks)
        bound = 4 * ROUNDING[self.setting.compression] * n * max(largest, 1e-3) * factor
        if not self.setting.average:
            bound *= n
        none = {name for name, gradient in found.items() if gradient is None}
        expected_none = {name for name, gradient in expected.items() if gradient is None}
        assert none == expected_none, f"None for {none}, expected {expected_none}"
        for gradient in found.values():
            if isinstance(gradient, tf.IndexedSlices):  # optimizers square rows one by one
                assert len(set(gradient.indices.numpy())) == len(gradient.indices)
        dense = {k: dense_of(v) for k, v in found.items() if v is not None}
        self.same_bits(dense)
        for name, gradient in dense.items():
            worst = float(np.max(np.abs(gradient - expected[name]), initial=0.0))
            assert worst <= bound, f"the gradient of {name} is off by {worst}, bound {bound}"

    def same_bits(self, values: dict[str, Any]) -> None:
        """Assert that the values are bit-identical on the ranks of the process set."""
        flat = np.concatenate([np.zeros(1), *(np.ravel(value) for value in values.values())])
        everyone = self.hvd.allgather(
            tf.constant(flat)[None], name="same bits", process_set=self.process_set
        ).numpy()
        for other in everyone[1:]:
            np.testing.assert_array_equal(other, everyone[0], err_msg=str(list(values)))

    def apply(self, found: dict[str, Any]) -> None:
        """Update the variables with gradients, and the reference with the same gradients."""
        if self.hvd.rank() not in self.ranks:
            return
        update(self.variables, found, self.optimizer)
        update(self.reference, found, self.plain)

    def check(self) -> None:
        """Compare the variables of the ranks, and those of the reference."""
        if self.hvd.rank() not in self.ranks:
            return
        own = {name: np.asarray(variable) for name, variable in self.variables.items()}
        self.same_bits(own)
        for name, variable in self.reference.items():
            np.testing.assert_allclose(np.asarray(variable), own[name], rtol=1e-12, atol=1e-12)

    def chosen(self, number: int) -> int:
        return self.ranks[number % len(self.ranks)]


def _never(name: str, shape: Any) -> bool:
    return False


_sets: dict[tuple[int, ...], Any] = {}


def _set_of(hvd: Any, ranks: list[int]) -> Any:
    """Return the process set of these ranks, registered once in a job."""
    key = tuple(ranks)
    if key not in _sets:
        _sets[key] = hvd.add_process_set(ranks)
    return _sets[key]


def dense_of(gradient: Any) -> np.ndarray:
    """Return a gradient as an array."""
    return np.asarray(tf.convert_to_tensor(gradient))


def loss_of(variables: dict[str, Any], x: Any, words: Any, part: str) -> Any:
    """Return the loss of a batch, which uses a part of the model."""
    v = {name: tf.convert_to_tensor(variable) for name, variable in variables.items()}
    x = tf.convert_to_tensor(x)
    if part != "unscaled":
        x += tf.reduce_sum(tf.gather(variables["words"], words), axis=0)
    if part == "twice":
        # The embedding has a dense gradient too.
        x += tf.reduce_mean(v["words"], axis=0)
    hidden = tf.tanh(x @ v["w1"] + v["b1"])
    y = hidden @ v["branch" if part == "branch" else "w2"]
    if part != "unscaled":
        y *= v["scale"]
    if part == "words":
        y = tf.stop_gradient(y) + tf.reduce_sum(tf.gather(variables["words"], words))
    return tf.reduce_mean(tf.square(y))


def update(variables: dict[str, Any], gradients: dict[str, Any], optimizer: Any) -> None:
    """Update variables with the gradients that are not None."""
    given = [(gradients[k], variables[k]) for k in variables if gradients.get(k) is not None]
    if optimizer is not None and given:
        if not optimizer.built:
            optimizer.build(list(variables.values()))
        optimizer.apply_gradients(given)
        return
    for gradient, variable in given:
        variable.assign(variable - 0.05 * dense_of(gradient))


ACTIONS = action = Actions()


def run_sequence(hvd: Any, setting: Setting, actions: list[tuple[str, int]]) -> None:
    """Run a sequence of actions on this rank, and then a step."""
    world = World(hvd, setting)
    try:
        for name, number in [*actions, ("step", 7)]:
            ACTIONS[name](world, number)
            world.check()
    finally:
        tf.config.run_functions_eagerly(False)


def _named(names: Any, values: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


# --- the actions --------------------------------------------------------------------------------


@action
def step(world: World, number: int) -> None:
    """Make an eager step; the ranks use the same part of the model."""
    _eager_step(world, number, differ=False)


@action
def step_with_other_parts(world: World, number: int) -> None:
    """Make an eager step in which the ranks use other parts of the model."""
    _eager_step(world, number, differ=True)


def _eager_step(world: World, number: int, differ: bool) -> None:
    parts = world.parts(number, differ)
    rank = world.hvd.rank()
    with tf.GradientTape() as tape:
        loss = loss_of(world.variables, *world.batch(number, rank), parts[rank])
    tape = world.wrap(tape)
    found = _named(world.variables, tape.gradient(loss, list(world.variables.values())))
    world.compare(found, *world.expected(world.losses(number, parts)))
    world.apply(found)


@action
def step_in_a_function(world: World, number: int) -> None:
    """Make a step in a `tf.function`, which some ranks trace again because of other shapes."""
    part = world.parts(number, False)[0]

    def make() -> Callable[..., Any]:
        def run(x: Any, words: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(world.variables, x, words, part)
            return world.wrap(tape).gradient(loss, list(world.variables.values()))

        return run

    x, words = map(tf.constant, world.batch(number, world.hvd.rank()))
    found = _named(world.variables, world.function((part,), make)(x, words))
    world.compare(found, *world.expected(world.losses(number, [part] * world.hvd.size())))
    world.apply(found)


@action
def branch_in_a_function(world: World, number: int) -> None:
    """Make a step in a `tf.function` whose ranks take different branches of a condition."""

    def make() -> Callable[..., Any]:
        def run(x: Any, words: Any, first: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.cond(
                    first,
                    lambda: loss_of(world.variables, x, words, "all"),
                    lambda: loss_of(world.variables, x, words, "branch"),
                )
            return world.wrap(tape).gradient(loss, list(world.variables.values()))

        return run

    draw = random.Random(number)
    first = [draw.random() < 0.5 for _ in range(world.hvd.size())]
    x, words = map(tf.constant, world.batch(number, world.hvd.rank()))
    run = world.function("branch", make)
    found = _named(world.variables, run(x, words, tf.constant(first[world.hvd.rank()])))
    parts = ["all" if chosen else "branch" for chosen in first]
    expected, largest = world.expected(world.losses(number, parts))
    # In a graph, the variables of the other branch have zeros.
    expected = {
        name: np.zeros(world.variables[name].shape) if value is None else value
        for name, value in expected.items()
    }
    world.compare(found, expected, largest)
    world.apply(found)


@action
def steps_in_a_loop(world: World, number: int) -> None:
    """Make steps in a loop of a graph, and update the variables there."""
    if world.setting.compression != "none" or world.hvd.rank() not in world.ranks:
        return
    count = 1 + number % 3

    def make() -> Callable[..., Any]:
        def run(x: Any, words: Any, count: Any) -> None:
            for _ in tf.range(count):
                with tf.GradientTape() as tape:
                    loss = loss_of(world.variables, x, words, "twice")
                tape = world.wrap(tape)
                gradients = tape.gradient(loss, list(world.variables.values()))
                for variable, gradient in zip(world.variables.values(), gradients, strict=True):
                    if gradient is not None:
                        variable.assign(variable - 0.05 * tf.convert_to_tensor(gradient))

        return run

    x, words = map(tf.constant, world.batch(number, world.hvd.rank()))
    world.function("loop", make)(x, words, tf.constant(count))
    parts = ["twice"] * world.hvd.size()
    for _ in range(count):
        expected, _ = world.expected(world.losses(number, parts))
        update(world.reference, expected, None)


@action
def two_tapes(world: World, number: int) -> None:
    """Make a step with two tapes for different variables, in a function or not."""
    first = ["w1", "b1", "words"]
    second = ["branch", "scale", "w1"]

    def make() -> Callable[..., Any]:
        def run(x: Any, words: Any) -> Any:
            with tf.GradientTape() as tape, tf.GradientTape() as other:
                loss = loss_of(world.variables, x, words, "all")
                further = 2.0 * loss_of(world.variables, x, words, "branch")
            own = world.wrap(tape).gradient(loss, [world.variables[k] for k in first])
            tape = world.wrap(other)
            return own, tape.gradient(further, [world.variables[k] for k in second])

        return run

    x, words = map(tf.constant, world.batch(number, world.hvd.rank()))
    run = world.function("two", make) if number % 2 else make()
    found, others = run(x, words)
    every = range(world.hvd.size())
    losses = world.losses(number, ["all" for _ in every])
    world.compare(_named(first, found), *world.expected(losses, first))
    branch = world.losses(number, ["branch" for _ in every])
    expected, largest = world.expected(branch, second)
    doubled = {name: 2.0 * value for name, value in expected.items()}
    world.compare(_named(second, others), doubled, 2 * largest)
    world.apply(_named(first, found))
    world.apply(_named(second, others))


@action
def persistent_tape(world: World, number: int) -> None:
    """Compute the gradients of two losses with one persistent tape."""
    rank = world.hvd.rank()
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(world.variables, *world.batch(number, rank), "all")
        other = loss_of(world.variables, *world.batch(number + 1, rank), "branch")
    tape = world.wrap(tape)
    sources = list(world.variables.values())
    for value, k, part in ((loss, number, "all"), (other, number + 1, "branch")):
        found = _named(world.variables, tape.gradient(value, sources))
        world.compare(found, *world.expected(world.losses(k, [part] * world.hvd.size())))


@action
def nested_sources(world: World, number: int) -> None:
    """Pass the sources as a dict of lists, some of them twice."""
    rank = world.hvd.rank()
    v = world.variables
    with tf.GradientTape() as tape:
        loss = loss_of(v, *world.batch(number, rank), "all")
    sources = {"z": [v["w2"], v["w1"]], "a": v["b1"], "again": (v["w1"], {"s": v["scale"]})}
    found = world.wrap(tape).gradient(loss, sources)
    flat = {
        "w2": found["z"][0],
        "w1": found["z"][1],
        "b1": found["a"],
        "scale": found["again"][1]["s"],
    }
    losses = world.losses(number, ["all"] * world.hvd.size())
    world.compare(flat, *world.expected(losses, list(flat)))
    if world.hvd.rank() in world.ranks:
        np.testing.assert_array_equal(dense_of(found["again"][0]), dense_of(flat["w1"]))


@action
def one_source(world: World, number: int) -> None:
    """Pass one variable as the source, and ask for zeros instead of None."""
    rank = world.hvd.rank()
    with tf.GradientTape() as tape:
        loss = loss_of(world.variables, *world.batch(number, rank), "unscaled")
    found = world.wrap(tape).gradient(
        loss,
        tf_variable(world.variables["scale"]),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    if rank in world.ranks:
        assert dense_of(found) == 0.0


@action
def penalty(world: World, number: int) -> None:
    """Add the norm of the gradient of the inputs to the loss."""

    def loss(variables: dict[str, Any], x: Any, words: Any) -> Any:
        x = tf.constant(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            value = loss_of(variables, x, words, "all")
        return value + tf.reduce_sum(tf.square(inner.gradient(value, x)))

    rank = world.hvd.rank()
    with tf.GradientTape() as tape:
        own = loss(world.variables, *world.batch(number, rank))
    found = _named(world.variables, world.wrap(tape).gradient(own, [*world.variables.values()]))

    def of(r: int) -> Callable[[dict[str, Any]], Any]:
        return lambda variables: loss(variables, *world.batch(number, r))

    world.compare(found, *world.expected([of(r) for r in world.ranks]))
    world.apply(found)


@action
def record_with_the_wrapped_tape(world: World, number: int) -> None:
    rank = world.hvd.rank()
    with world.wrap(tf.GradientTape()) as tape:
        loss = loss_of(world.variables, *world.batch(number, rank), "twice")
    found = _named(world.variables, tape.gradient(loss, list(world.variables.values())))
    world.compare(found, *world.expected(world.losses(number, ["twice"] * world.hvd.size())))
    world.apply(found)


@action
def local_source(world: World, number: int) -> None:
    """Exclude a variable from the reduction."""
    rank = world.hvd.rank()
    with tf.GradientTape() as tape:
        loss = loss_of(world.variables, *world.batch(number, rank), "all")
    tape = world.wrap(tape)
    tape.register_local_source(world.variables["w2"])
    found = _named(world.variables, tape.gradient(loss, list(world.variables.values())))
    local = found.pop("w2")
    losses = world.losses(number, ["all"] * world.hvd.size())
    expected, largest = world.expected(losses)
    del expected["w2"]
    world.compare(found, expected, largest)
    if rank in world.ranks:
        own, _ = world.expected([losses[world.ranks.index(rank)]])
        share = len(world.ranks)
        np.testing.assert_allclose(dense_of(local) * share, own["w2"], rtol=1e-12)


@action
def loss_of_a_compiled_function(world: World, number: int) -> None:
    """Compute the loss in a function that XLA compiles, and the gradients outside of it."""
    if "compiled" not in world.functions:
        v = world.variables

        def forward(x: Any) -> Any:
            w1, b1, w2 = (tf.convert_to_tensor(v[k]) for k in ("w1", "b1", "w2"))
            return tf.reduce_mean(tf.square(tf.tanh(x @ w1 + b1) @ w2))

        world.functions["compiled"] = tf.function(forward, jit_compile=True)
    rank = world.hvd.rank()
    with tf.GradientTape() as tape:
        loss = world.functions["compiled"](tf.constant(world.batch(number, rank)[0]))
    found = _named(world.variables, world.wrap(tape).gradient(loss, [*world.variables.values()]))
    world.compare(found, *world.expected(world.losses(number, ["unscaled"] * world.hvd.size())))
    world.apply(found)


@action
def run_functions_eagerly(world: World, number: int) -> None:
    """Run all functions eagerly, or no longer, as for debugging."""
    tf.config.run_functions_eagerly(bool(number % 2))


@action
def reduce_by_hand(world: World, number: int) -> None:
    """Reduce gradients one by one with `hvd.allreduce`, in a function or not."""
    if world.setting.compression not in ("none", "fp16"):
        return
    names = ["w1", "b1", "words", "w2", "scale"]
    op = world.hvd.Average if world.setting.average else world.hvd.Sum
    compression = getattr(world.hvd.Compression, world.setting.compression)

    def make() -> Callable[..., Any]:
        def run(x: Any, words: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(world.variables, x, words, "all")
            gradients = tape.gradient(loss, [world.variables[k] for k in names])
            return [
                world.hvd.allreduce(
                    g, op=op, name=k, compression=compression, process_set=world.process_set
                )
                for k, g in zip(names, gradients, strict=True)
            ]

        return run

    if world.hvd.rank() not in world.ranks:
        return
    x, words = map(tf.constant, world.batch(number, world.hvd.rank()))
    found = (world.function("by hand", make) if number % 2 else make())(x, words)
    losses = world.losses(number, ["all"] * world.hvd.size())
    expected, largest = world.expected(losses, names)
    # Unlike a tape, `hvd.allreduce` keeps the rows of each rank.
    dense = [tf.convert_to_tensor(gradient) for gradient in found]
    world.compare(_named(names, dense), expected, largest, 4.0)


@action
def load_on_one_rank(world: World, number: int) -> None:
    """Set the variables on one rank, and broadcast them, in a function or not."""

    root = world.chosen(number)
    draw = np.random.default_rng(number)
    values = {name: draw.normal(size=v.shape) for name, v in world.reference.items()}
    for name, value in values.items():
        world.reference[name].assign(value)
        if world.hvd.rank() == root:
            world.variables[name].assign(value)

    def make() -> Callable[..., Any]:
        def run() -> None:
            world.hvd.broadcast_variables(
                [tf_variable(v) for v in world.variables.values()], root_rank=root
            )

        return run

    (world.function(("broadcast", root), make) if number % 2 else make())()


def tf_variable(variable: Any) -> Any:
    """Return the variable of TensorFlow."""
    return getattr(variable, "value", variable) if hasattr(variable, "path") else variable


@action
def evaluate_on_one_rank(world: World, number: int) -> None:
    """Trace and call a function without a collective on one rank."""
    if world.hvd.rank() == world.chosen(number):
        evaluate = tf.function(lambda x: loss_of(world.variables, x, [1, 2], "all"))
        evaluate(tf.constant(world.batch(number, 0)[0]))


@action
def collectives_of_the_script(world: World, number: int) -> None:
    """Call collectives of the script's own values."""
    hvd, n = world.hvd, world.hvd.size()
    value = tf.constant([float(hvd.rank()), 1.0])
    np.testing.assert_allclose(hvd.allreduce(value, op=hvd.Sum).numpy(), [n * (n - 1) / 2, n])
    rows = hvd.allgather(tf.fill([hvd.rank() % 2 + number % 2, 2], hvd.rank()))
    assert rows.shape[0] == sum(rank % 2 + number % 2 for rank in range(n))
    assert hvd.broadcast_object({"number": hvd.rank()}, root_rank=n - 1) == {"number": n - 1}
    mean = tf.function(lambda x: hvd.allreduce(x))(tf.constant(float(hvd.rank())))
    np.testing.assert_allclose(mean, (n - 1) / 2)


@action
def compute_twice(world: World, number: int) -> None:
    """Compute the gradients of one tape twice, which raises on every rank."""
    with tf.GradientTape() as tape:
        loss = loss_of(world.variables, *world.batch(number, world.hvd.rank()), "all")
    tape = world.wrap(tape)
    tape.gradient(loss, list(world.variables.values()))
    try:
        tape.gradient(loss, list(world.variables.values()))
    except RuntimeError:
        return
    raise AssertionError("the second call of gradient() did not raise")


@action
def joined_epoch(world: World, number: int) -> None:
    """Make a step on some ranks only, while the others wait in `join`."""
    if world.setting.members or world.setting.compression == "int8":
        return
    missing = number % world.hvd.size()
    if world.hvd.size() == 1:
        return
    rank = world.hvd.rank()
    names = ["w1", "b1", "w2"]
    if rank != missing:
        with tf.GradientTape() as tape:
            loss = loss_of(world.variables, *world.batch(number, rank), "all")
        found = world.wrap(tape, check_parameters=False).gradient(
            loss, [world.variables[k] for k in names]
        )
    world.hvd.join()
    if rank == missing:
        found = [tf.zeros(world.variables[k].shape, tf.float64) for k in names]
    # The ranks that have joined do not get the gradients.
    found = [
        world.hvd.broadcast(g, 0 if missing else 1, name=f"joined {k}") for k, g in enumerate(found)
    ]
    losses = world.losses(number, ["all"] * world.hvd.size())
    del losses[missing]
    expected, largest = world.expected(losses, names)
    if world.setting.average:
        share = len(losses) / world.hvd.size()
        expected = {k: v * share for k, v in expected.items()}
    world.compare(_named(names, found), expected, largest)
