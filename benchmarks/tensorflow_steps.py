"""One step of a tape loop with gradient synchronisation. See `scripts/bench_tensorflow`."""

import functools
import importlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.jobs import REPOSITORY
from benchmarks.runner import measure, run_command
from benchmarks.variants import BACKWARD, HVDKIT, Benchmark, Variant, arguments
from benchmarks.worker import Workload, engine_in_use, serve
from hvdkit.errors import HvdkitError

if TYPE_CHECKING:
    import keras

KERAS = "keras"
BARE = "bare"
#: The learning rate of SGD in `fit`. The gradient is the change of a variable, divided by it.
LEARNING_RATE = 0.01

BENCHMARK = Benchmark(
    program=REPOSITORY / "scripts" / "bench_tensorflow",
    framework="tensorflow",
    step="forward, backward and synchronisation",
    models=("resnet50",),
    wires={
        ("hvdkit", "gloo"): ("fp32", "fp16", "bf16", "int8"),
        ("hvdkit", "mpi"): ("fp32", "fp16", "bf16", "int8"),
        ("flat", "gloo"): ("fp32", "fp16"),
        ("before", "gloo"): ("fp32", "fp16", "bf16"),
        ("stock", "gloo"): ("fp32", "fp16"),
        ("stock", "mpi"): ("fp32", "fp16"),
        ("engine", "gloo"): ("fp32", "fp16"),
        ("strategy", "gloo"): ("fp32",),
        ("engine", "mpi"): ("fp32", "fp16"),
        ("keras", "gloo"): ("fp32", "fp16"),
        ("keras", "mpi"): ("fp32", "fp16"),
        (BARE, "gloo"): ("fp32", "fp16"),
    },
    pairs=(
        ("hvdkit-gloo-fp32", "flat-gloo-fp32"),
        ("hvdkit-gloo-fp16", "flat-gloo-fp16"),
        ("hvdkit-gloo-fp32", "before-gloo-fp32"),
        ("hvdkit-gloo-fp16", "before-gloo-fp16"),
        ("hvdkit-gloo-bf16", "before-gloo-bf16"),
        ("hvdkit-gloo-fp32", "stock-gloo-fp32"),
        ("hvdkit-gloo-fp16", "stock-gloo-fp16"),
        ("hvdkit-gloo-fp32", "engine-gloo-fp32"),
        ("hvdkit-gloo-fp32", "strategy-gloo-fp32"),
        ("hvdkit-gloo-fp16", "hvdkit-gloo-fp32"),
        ("hvdkit-gloo-bf16", "hvdkit-gloo-fp16"),
        ("hvdkit-gloo-int8", "hvdkit-gloo-fp16"),
        ("hvdkit-mpi-fp32", "stock-mpi-fp32"),
        ("hvdkit-mpi-fp16", "stock-mpi-fp16"),
        ("hvdkit-mpi-fp32", "engine-mpi-fp32"),
        ("hvdkit-mpi-fp16", "hvdkit-mpi-fp32"),
        ("hvdkit-gloo-fp32", "backward"),
        ("hvdkit-mpi-fp32", "backward"),
        ("keras-gloo-fp32", "keras"),
        ("keras-gloo-fp16", "keras"),
        ("keras-mpi-fp32", "keras"),
        ("bare-gloo-fp32", "keras"),
        ("bare-gloo-fp16", "keras"),
        ("keras-gloo-fp32", "bare-gloo-fp32"),
        ("keras-gloo-fp16", "bare-gloo-fp16"),
    ),
    alone=(BACKWARD, KERAS),
    # bfloat16 over MPI gives the same as over Gloo.
    on_demand=frozenset(
        {
            "hvdkit-mpi-bf16",
            "hvdkit-mpi-int8",
            "strategy-gloo-fp32",
            "bare-gloo-fp32",
            "bare-gloo-fp16",
            KERAS,
        }
        | {f"{KERAS}-{controller}-{w}" for controller in ("gloo", "mpi") for w in ("fp32", "fp16")}
    ),
)


def main(description: str) -> int:
    """Run the command line. Return the exit status.

    Args:
        description: of the script, for `--help`.
    """
    parser = arguments(
        BENCHMARK,
        description,
        "examples:\n"
        "  hvdkit build --frameworks tensorflow --patches minimal --target stock/\n"
        "  scripts/bench_tensorflow --stock stock/ --steps 30\n"
        "  scripts/bench_tensorflow --variants hvdkit-gloo-fp32,hvdkit-gloo-fp16\n"
        "  sudo scripts/bench_tensorflow --stock stock/ --networks 1gbit",
    )
    options = parser.parse_args()
    return run_command(lambda: measure(BENCHMARK, options), "bench_tensorflow")


class Tape:
    """A `worker.Workload`: the gradients of ResNet-50 in a tf.function, synchronised."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._hvd, distributed = _tape(spec)
        model, image, label, loss_of = _task(spec, self._hvd)
        import tensorflow as tf

        self._variables = [variable.value for variable in model.trainable_variables]

        @tf.function
        def gradients() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(label, model(image, training=True))
            return distributed(tape).gradient(loss, self._variables)

        self._gradients = gradients
        self._last: Any = None
        self._norm: float | None = None

    def facts(self) -> dict[str, Any]:
        """Return the number and the bytes of the gradients."""
        sizes = [math.prod(variable.shape) * variable.dtype.size for variable in self._variables]
        return {"parameters": len(sizes), "bytes": sum(sizes)}

    def prepare(self) -> None:
        """Free the gradients of the last step."""
        self._last = None

    def step(self) -> None:
        """Compute and reduce the gradients."""
        self._last = self._gradients()

    def after_step(self) -> None:
        """Compute the norm of the first gradients."""
        if self._norm is None:
            self._norm = math.hypot(*(float((g.numpy() ** 2).sum()) ** 0.5 for g in self._last))

    def norm(self) -> float:
        """Return the norm of the first reduced gradients."""
        assert self._norm is not None
        return self._norm

    def close(self) -> None:
        """Leave the job."""
        if self._hvd is not None:
            self._hvd.shutdown()


class Strategy(Tape):
    """The same loop with `tf.distribute.MultiWorkerMirroredStrategy`, as in TensorFlow's guide.

    It reduces in one call after the backward pass.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import tensorflow as tf
        from tensorflow.python.distribute.collective_all_reduce_strategy import (
            CollectiveAllReduceExtended,
        )
        from tensorflow.python.eager import context

        # The health check would end jobs that are stopped (SIGSTOP) between turns.
        CollectiveAllReduceExtended._enable_check_health = False
        configure = context.context().configure_coordination_service
        context.context().configure_coordination_service = functools.partial(
            configure, heartbeat_timeout_in_ms=86_400_000
        )
        workers = _addresses(spec)
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": spec["rank"]}}
        )
        communication = tf.distribute.experimental
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=communication.CommunicationOptions(
                implementation=communication.CommunicationImplementation.RING
            )
        )
        with strategy.scope():
            model, image, label, loss_of = _task(spec, None)
        self._hvd = None
        self._variables = [variable.value for variable in model.trainable_variables]
        self._last: Any = None
        self._norm: float | None = None

        def replica() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(label, model(image, training=True))
            gradients = tape.gradient(loss, self._variables)
            # Keras's losses are divided by the number of replicas.
            return tf.distribute.get_replica_context().all_reduce("SUM", gradients)

        self._gradients = tf.function(lambda: strategy.run(replica))

    def close(self) -> None:
        """End the process: TensorFlow's shutdown waits for the other ranks without a timeout."""
        sys.stdout.flush()
        os._exit(0)


def _addresses(spec: Mapping[str, Any]) -> list[str]:
    """Return the address of each rank for gRPC. The ranks exchange them in files."""
    # The address that reaches the rendezvous. This sends no packet.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], 9))
        host = probe.getsockname()[0]
    with socket.create_server((host, 0)) as server:
        own = f"{host}:{server.getsockname()[1]}"
    files = [Path(f"{spec['store']}.{rank}") for rank in range(spec["size"])]
    written = Path(f"{files[spec['rank']]}.writing")
    written.write_text(own)
    written.rename(files[spec["rank"]])
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            missing = [str(file) for file in files if not file.exists()]
            raise HvdkitError(f"ranks did not write their addresses within 60 s: {missing}")
        time.sleep(0.05)
    return [file.read_text() for file in files]


class Fit:
    """A `worker.Workload`: steps of `fit`, with the same model and image."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        variant = Variant(*spec["variant"])
        self._hvd = None
        if variant.optimizer == KERAS and variant.controller:
            import hvdkit.keras as hvd

            self._hvd = hvd
            engine_in_use(spec, importlib.import_module("hvdkit.tensorflow"))
        model, image, label, loss_of = _task(spec, self._hvd)
        import keras
        import tensorflow as tf

        optimizer = keras.optimizers.SGD(LEARNING_RATE)
        if self._hvd is not None:
            wire = "none" if variant.wire == "fp32" else variant.wire
            optimizer = self._hvd.DistributedOptimizer(optimizer, compression=wire)
        model.compile(optimizer, loss_of)
        model.make_train_function()
        self._model = model
        self._data = iter(tf.data.Dataset.from_tensors((image, label)).repeat())
        self._before = [variable.numpy() for variable in model.trainable_variables]
        self._norm: float | None = None

    def facts(self) -> dict[str, Any]:
        """Return the number and the bytes of the gradients."""
        return {"parameters": len(self._before), "bytes": sum(v.nbytes for v in self._before)}

    def prepare(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Train on the image."""
        self._model.train_function(self._data)

    def after_step(self) -> None:
        """Compute the gradients of the first step from the change of the variables."""
        if self._norm is None:
            after = self._model.trainable_variables
            changes = zip(self._before, after, strict=True)
            squares = sum(float(((old - new.numpy()) ** 2).sum()) for old, new in changes)
            self._norm = squares**0.5 / LEARNING_RATE

    def norm(self) -> float:
        """Return the norm of the first reduced gradients."""
        assert self._norm is not None
        return self._norm

    def close(self) -> None:
        """Leave the job."""
        if self._hvd is not None:
            self._hvd.shutdown()


class Bare(Fit):
    """Local steps on each rank, while the engine sums as many bytes as the gradients have."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        import horovod.tensorflow as hvd
        import tensorflow as tf

        engine_in_use(spec, hvd)
        self._hvd = hvd
        dtype = tf.float32 if spec["variant"][2] == "fp32" else tf.float16
        elements = sum(value.size for value in self._before)
        buckets = math.ceil(elements * dtype.size / 25e6)
        self._buckets = [tf.zeros([elements // buckets], dtype) for _ in range(buckets)]

    def step(self) -> None:
        """Train on the image, and wait for the sums."""
        thread = threading.Thread(target=self._reduce)
        thread.start()
        super().step()
        thread.join()

    def _reduce(self) -> None:
        assert self._hvd is not None
        for number, bucket in enumerate(self._buckets):
            self._hvd.allreduce(bucket, op=self._hvd.Sum, name=f"hvdkit.bare.{number}")

    def norm(self) -> float:
        """Return NaN: the gradients are not reduced."""
        return math.nan


def _task(spec: Mapping[str, Any], hvd: Any) -> tuple[Any, Any, Any, Any]:
    """Return the model, an image, its label and the loss: the same model, other data per rank."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = resnet50()
    rank = spec["rank"] if hvd is None else hvd.rank()
    image = tf.random.stateless_normal((1, 224, 224, 3), (1, rank))
    label = tf.random.stateless_uniform((1,), (2, rank), maxval=1000, dtype=tf.int32)
    return model, image, label, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _tape(spec: Mapping[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Return the initialised library of the variant, or None, and a function that wraps a tape."""
    variant = Variant(*spec["variant"])
    if variant.optimizer == BACKWARD:
        return None, lambda tape: tape
    library = "hvdkit" if variant.optimizer in HVDKIT else "horovod"
    hvd = importlib.import_module(f"{library}.tensorflow")
    engine_in_use(spec, hvd)
    wire = "none" if variant.wire == "fp32" else variant.wire
    settings: dict[str, Any] = {"compression": getattr(hvd.Compression, wire)}
    if variant.optimizer in HVDKIT and spec["bucket_bytes"]:
        settings["bucket_bytes"] = spec["bucket_bytes"]
    return hvd, lambda tape: hvd.DistributedGradientTape(tape, **settings)


def resnet50() -> "keras.Model":
    """Return ResNet-50 as in torchvision: 161 trainable variables, 25,557,032 elements."""
    import keras
    from keras import layers

    def convolution(x: Any, channels: int, width: int, stride: int = 1) -> Any:
        # Padding as in PyTorch; TensorFlow's "same" depends on the stride.
        x = layers.ZeroPadding2D(width // 2)(x) if width > 1 else x
        x = layers.Conv2D(channels, width, stride, use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    def bottleneck(x: Any, width: int, stride: int) -> Any:
        branch = layers.ReLU()(convolution(x, width, 1))
        branch = layers.ReLU()(convolution(branch, width, 3, stride))
        branch = convolution(branch, 4 * width, 1)
        if x.shape[-1] != 4 * width:
            x = convolution(x, 4 * width, 1, stride)
        return layers.ReLU()(branch + x)

    image = keras.Input((224, 224, 3))
    x = layers.ReLU()(convolution(image, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            x = bottleneck(x, 64 << stage, 2 if stage and not block else 1)
    return keras.Model(image, layers.Dense(1000)(layers.GlobalAveragePooling2D()(x)))


def rank_main(spec: Mapping[str, Any]) -> None:
    """Run a rank of the benchmark."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    tensorflow.config.threading.set_inter_op_parallelism_threads(2)
    workloads: dict[str, Callable[[Any], Workload]]
    workloads = {KERAS: Fit, BARE: Bare, "strategy": Strategy}
    workload = workloads.get(spec["variant"][0], Tape)
    serve(spec, lambda: workload(spec))
