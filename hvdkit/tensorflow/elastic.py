"""Horovod's elastic training, with this package's `init` and broadcasts."""

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
    """Decorator for an elastic training function; the first argument is the state to keep."""

    @wraps(func)
    def converting(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except tf.errors.UnknownError as error:
            # TensorFlow knows no other way to say that a rank is gone. Horovod's operations have
            # one of these in their names, and a broken network's error nothing else.
            if "Horovod" in str(error) or "hvdkit" in str(error):
                raise HorovodInternalError(error) from error
            raise

    decorated: Callable[..., Any] = run_fn(converting, _reset)
    return decorated


def _reset() -> None:
    shutdown()
    init()


class _VariablesState(ObjectState):
    """Keeps variables, and the objects that are its further arguments."""

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
        """Bring everything back to where it was at the last `save`."""
        for variable, value in self._saved_variables:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give every rank what rank 0 has. A collective."""
        broadcast_variables(self._all_variables(), root_rank=0)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        self._saved_variables = [(v, v.numpy()) for v in self._all_variables()]


class TensorFlowKerasState(_VariablesState):
    """A Keras model, its optimizer, and any picklable objects.

    Args:
        model: built.
        optimizer: default the one that the model is compiled with. It is built here where it is
            not, so that old and new ranks have the same variables.
        backend: accepted because Horovod's class has it; there are no sessions.
        kwargs: objects to keep; they become attributes.

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
        of_optimizer = getattr(self.optimizer, "variables", ())
        # A method until Keras 3.
        return [
            *self.model.variables,
            *(of_optimizer() if callable(of_optimizer) else of_optimizer),
        ]


class TensorFlowState(_VariablesState):
    """A list of variables, and any picklable objects.

    Args:
        variables: `tf.Variable` or `keras.Variable`.
        session: accepted because Horovod's class has it; must be None.
        kwargs: objects to keep; they become attributes.

    Raises:
        UsageError: a session is given.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if session is not None:
            raise UsageError("session is given: there are none in TensorFlow 2, leave it out")
        self.variables = list(variables or ())
        super().__init__(**kwargs)

    def _all_variables(self) -> Sequence[Any]:
        return self.variables
