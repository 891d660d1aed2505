"""A rank of a step benchmark in TensorFlow, or in Keras on TensorFlow."""

import functools
import importlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvdkit.bench.step.variants import BARE, HVDKIT, KERAS, STRATEGY, Variant
from hvdkit.bench.worker import Workload, init_checked
from hvdkit.errors import HvdkitError

#: The learning rate of SGD. `_first` divides the change of a variable by it to get the gradient.
LEARNING_RATE = 0.01


def build(spec: Mapping[str, Any]) -> Workload:
    """Return the work of this rank."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    # With one inter-op thread, TensorFlow would run the whole backward pass before the reductions,
    # and nothing would overlap.
    tensorflow.config.threading.set_inter_op_parallelism_threads(2)
    variant = Variant(*spec["variant"])
    if variant.framework == KERAS:
        return Bare(spec) if variant.optimizer == BARE else Fit(spec)
    return Strategy(spec) if variant.optimizer == STRATEGY else Tape(spec)


class _Steps:
    """A `worker.Workload`: steps of a model. Subclasses set the attributes and define `_step`.

    Attributes:
        variables: the variables of the model.
        hvd: the library that reduces the gradients; None for a variant without reduction.
    """

    variables: list[Any]
    hvd: Any = None

    def facts(self) -> dict[str, Any]:
        """Return the number and the bytes of the gradients."""
        sizes = [math.prod(variable.shape) * variable.dtype.size for variable in self.variables]
        return {"parameters": len(sizes), "bytes": sum(sizes)}

    def answer(self, command: str, message: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Make a step: `first` returns the norm of the gradients, `step` the times."""
        if command == "first":
            return {"norm": self._first()}
        began, cpu_began = time.perf_counter(), time.process_time()
        # Kept until the end of this method: freeing the result is not timed.
        result = self._step()  # noqa: F841
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cpu": time.process_time() - cpu_began}

    def _step(self) -> Any:
        raise NotImplementedError

    def _first(self) -> float:
        """Make the first step, and return the norm of its gradients."""
        before = [variable.numpy() for variable in self.variables]
        self._step()
        changes = zip(before, self.variables, strict=True)
        squares = sum(float(((old - new.numpy()) ** 2).sum()) for old, new in changes)
        return squares**0.5 / LEARNING_RATE

    def close(self) -> None:
        """Leave the job."""
        if self.hvd is not None:
            self.hvd.shutdown()


class Tape(_Steps):
    """A step in a tf.function: gradients and their reduction, and SGD unless `--part backward`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.hvd, distributed = _tape(spec)
        import tensorflow as tf

        model, inputs, targets, loss_of = _task(spec)
        self.variables = [variable.value for variable in model.trainable_variables]

        def gradients() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(targets, model(inputs, training=True))
            return distributed(tape).gradient(loss, self.variables)

        self._part = spec["part"]
        self._step = self._function(gradients)  # type: ignore[method-assign]

    def _function(self, gradients: Callable[[], Any]) -> Callable[[], Any]:
        """Return the tf.function of a step. `gradients` returns the reduced gradients."""
        import tensorflow as tf

        def step() -> Any:
            found = gradients()
            for variable, gradient in zip(self.variables, found, strict=True):
                variable.assign_sub(LEARNING_RATE * tf.convert_to_tensor(gradient))

        function: Callable[[], Any] = tf.function(step if self._part == "step" else gradients)
        return function

    def _first(self) -> float:
        if self._part == "step":
            return super()._first()
        import tensorflow as tf

        arrays = (tf.convert_to_tensor(gradient).numpy() for gradient in self._step())
        return math.hypot(*(float((array**2).sum()) ** 0.5 for array in arrays))


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
            model, inputs, targets, loss_of = _task(spec)
        self.variables = [variable.value for variable in model.trainable_variables]
        self._part = spec["part"]

        def replica() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(targets, model(inputs, training=True))
            gradients = tape.gradient(loss, self.variables)
            # A sum, because Keras divides each replica's loss by the number of replicas.
            return tf.distribute.get_replica_context().all_reduce("SUM", gradients)

        self._step = self._function(lambda: strategy.run(replica))  # type: ignore[method-assign]

    def close(self) -> None:
        """End the process: TensorFlow's shutdown waits for the other ranks without a timeout."""
        sys.stdout.flush()
        os._exit(0)


def _addresses(spec: Mapping[str, Any]) -> list[str]:
    """Return the address of each rank for gRPC. The ranks exchange them in files."""
    # Find the own address on the route to the rendezvous server. `connect` sends no packet here.
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


class Fit(_Steps):
    """Steps of Keras's `fit`, always on the same data."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        variant = Variant(*spec["variant"])
        hvd: Any = None
        if variant.optimizer in HVDKIT:
            import hvdkit.keras as hvd

            init_checked(spec, importlib.import_module("hvdkit.tensorflow"))
            self.hvd = hvd
        model, inputs, targets, loss_of = _task(spec)
        import keras
        import tensorflow as tf

        optimizer = keras.optimizers.SGD(LEARNING_RATE)
        if hvd is not None:
            wire = "none" if variant.wire == "fp32" else variant.wire
            optimizer = hvd.DistributedOptimizer(optimizer, compression=wire)
        model.compile(optimizer, loss_of)
        model.make_train_function()
        self._model = model
        self._data = iter(tf.data.Dataset.from_tensors((inputs, targets)).repeat())
        self.variables = [variable.value for variable in model.trainable_variables]

    def _step(self) -> None:
        self._model.train_function(self._data)


class Bare(Fit):
    """Steps without reduction, while the engine sums zeros, as many bytes as the gradients have."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        import horovod.tensorflow as hvd
        import tensorflow as tf

        init_checked(spec, hvd)
        self.hvd = hvd
        dtype = tf.float32 if Variant(*spec["variant"]).wire == "fp32" else tf.float16
        elements = sum(math.prod(variable.shape) for variable in self.variables)
        buckets = math.ceil(elements * dtype.size / 25e6)
        self._buckets = [tf.zeros([elements // buckets], dtype) for _ in range(buckets)]
        self._thread = ThreadPoolExecutor(max_workers=1)

    def _step(self) -> None:
        """Train, and wait for the sums."""
        reduction = self._thread.submit(self._reduce)
        super()._step()
        reduction.result()

    def _reduce(self) -> None:
        for number, bucket in enumerate(self._buckets):
            self.hvd.allreduce(bucket, op=self.hvd.Sum, name=f"hvdkit.bare.{number}")

    def _first(self) -> float:
        """Return NaN: the gradients are not reduced."""
        self._step()
        return math.nan


def _task(spec: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return model, inputs, targets and loss. Ranks have the same model and different data."""
    import keras

    from hvdkit.bench.step.tensorflow_models import MODELS, loss

    keras.utils.set_random_seed(0)
    make_model, make_data = MODELS[spec["model"]]
    inputs, targets = make_data(spec["batch"], spec["rank"])
    return make_model(), inputs, targets, loss(spec["model"])


def _tape(spec: Mapping[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Return the initialised library of the variant, or None, and a function that wraps a tape."""
    variant = Variant(*spec["variant"])
    if not variant.reduces:
        return None, lambda tape: tape
    library = "hvdkit" if variant.optimizer in HVDKIT else "horovod"
    hvd = importlib.import_module(f"{library}.tensorflow")
    init_checked(spec, hvd)
    wire = "none" if variant.wire == "fp32" else variant.wire
    settings: dict[str, Any] = {"compression": getattr(hvd.Compression, wire)}
    if variant.optimizer in HVDKIT and spec["bucket_bytes"]:
        settings["bucket_bytes"] = spec["bucket_bytes"]
    return hvd, lambda tape: hvd.DistributedGradientTape(tape, **settings)
