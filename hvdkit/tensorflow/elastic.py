"""Horovod's elastic training with hvdkit's `init` and broadcasts."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.mpi_ops import rank

from hvdkit.errors import UsageError
from hvdkit.tensorflow.functions import broadcast_object, broadcast_variables
from hvdkit.tensorflow.runtime import init, shutdown

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an elastic training function, whose first argument is the elastic state."""

    @wraps(func)
    def with_horovod_errors(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except tf.errors.UnknownError as error:
            # TensorFlow raises UnknownError if a rank is lost. The names of the operations in the
            # message are the only sign that Horovod failed.
            if "Horovod" in str(error) or "hvdkit" in str(error):
                raise HorovodInternalError(error) from error
            raise

    decorated: Callable[..., Any] = run_fn(with_horovod_errors, _reset)
    return decorated


def _reset() -> None:
    shutdown()
    init()


class _VariablesState(ObjectState):
    """Elastic state of variables, and of the objects given as keyword arguments."""

    def __init__(self, **kwargs: Any) -> None:
        self._save_variables()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def _all_variables(self) -> Sequence[Any]:
        raise NotImplementedError

    def save(self) -> None:
        """Copy everything to host memory."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Restore everything as of the last `save`."""
        for variable, value in self._saved_variables:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Broadcast everything from rank 0. A collective."""
        broadcast_variables(self._all_variables(), root_rank=0)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        self._saved_variables = [(v, v.numpy()) for v in self._all_variables()]


class TensorFlowKerasState(_VariablesState):
    """Elastic state of a Keras model, its optimizer, and any picklable objects.

    Args:
        model: a built model.
        optimizer: default: the optimizer of `model.compile`. It is built here if necessary, so
            that old and new ranks have the same variables.
        backend: for compatibility with Horovod; ignored.
        kwargs: further objects; they become attributes.

    Raises:
        UsageError: the model is not built.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        if not getattr(model, "built", True):
            raise UsageError("the model is not built: call model.build(input_shape) before this")
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and getattr(self.optimizer, "built", True) is False:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def _all_variables(self) -> Sequence[Any]:
        optimizer_variables = getattr(self.optimizer, "variables", ())
        # A method before Keras 3.
        if callable(optimizer_variables):
            optimizer_variables = optimizer_variables()
        return [*self.model.variables, *optimizer_variables]


class TensorFlowState(_VariablesState):
    """Elastic state of a list of variables, and of any picklable objects.

    Args:
        variables: `tf.Variable` or `keras.Variable`.
        session: for compatibility with Horovod; must be None.
        kwargs: further objects; they become attributes.

    Raises:
        UsageError: `session` is not None.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if session is not None:
            raise UsageError("session is given, but TensorFlow 2 has no sessions: omit it")
        self.variables = list(variables or ())
        super().__init__(**kwargs)

    def _all_variables(self) -> Sequence[Any]:
        return self.variables
