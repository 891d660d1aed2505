"""Horovod's elastic training with hvdkit's `init` and broadcasts.

`hvdkit run --elastic` starts all ranks again after a failure, and when the hosts have changed: see
`hvdkit.elastic`. Under Horovod's own launcher, its elastic training runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import keras
import tensorflow as tf
from horovod.common import elastic as horovod_elastic
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.tensorflow import mpi_ops

from hvdkit.checkpoint.items import Variables, named, several
from hvdkit.checkpoint.state import StatefulItem
from hvdkit.checkpoint.step_boundary import StepBoundary, window_boundary
from hvdkit.elastic.run import Adapter, elastic_function
from hvdkit.elastic.state import CommittedState
from hvdkit.errors import UsageError
from hvdkit.keras_variables.loss_scaling import check_compiled, outermost
from hvdkit.keras_variables.optimizer_slots import optimizer_variables
from hvdkit.tensorflow.checkpoint import tensor_of
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.functions import broadcast_object, is_seed
from hvdkit.tensorflow.reduction_items import distribution_of, reduction_item
from hvdkit.tensorflow.runtime import init, shutdown
from hvdkit.tensorflow.variables import tf_variable, tf_variables

__all__ = ["ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an elastic training function, whose first argument is the elastic state.

    See `hvdkit.torch.elastic.run`.
    """

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

    return elastic_function(with_horovod_errors, _adapter)


def _reset() -> None:
    shutdown()
    init()


_adapter = Adapter(
    collectives=lambda: TensorFlowCollectives(mpi_ops.global_process_set),
    local_rank=mpi_ops.local_rank,
    size=mpi_ops.size,
    shutdown=shutdown,
    horovods_run=lambda func: horovod_elastic.run_fn(func, _reset),
    interrupt=HostsUpdatedInterrupt,
)


def copy_advice(value: Any) -> str:
    """Return what to do with a value that must not be copied; "" if it may be copied."""
    if isinstance(value, tf.Variable) or (isinstance(value, tf.Module) and value.variables):
        return "use the argument `variables` of hvd.elastic.TensorFlowState"
    return ""


class _VariablesState(CommittedState, horovod_elastic.ObjectState):
    """Elastic state of variables, and of the objects given as keyword arguments.

    It also keeps the states of the reductions of all gradient tapes of this process.
    """

    _interrupt = HostsUpdatedInterrupt

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = mpi_ops.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank, **kwargs)

    def _all_variables(self) -> Sequence[Any]:
        raise NotImplementedError

    def _optimizers(self) -> Mapping[str, Any]:
        return {}

    def _distributions(self) -> list[Any]:
        found = [distribution_of(optimizer) for optimizer in self._optimizers().values()]
        return [distribution for distribution in found if distribution is not None]

    def _model_items(self) -> Mapping[str, StatefulItem]:
        return {
            "variables": Variables(self._stored_variables, "the variables of the state", tensor_of),
            "reduction": reduction_item(self._optimizers()),
        }

    def _stored_variables(self) -> dict[str, Any]:
        """Return the variables by name, without states of random seeds.

        If all ranks restored the same seed, their Dropout layers would drop the same units.
        """
        return named([v for v in self._all_variables() if not any(map(is_seed, tf_variables([v])))])

    def _originals(self) -> Iterable[Any]:
        return [*super()._originals(), *self._optimizers().values(), *self._all_variables()]

    def _advice(self, value: Any) -> str:
        return super()._advice(value) or copy_advice(value)

    def _make_boundary(self) -> StepBoundary:
        return window_boundary(self._distributions)

    def _discard_gradients(self) -> None:
        for distribution in self._distributions():
            distribution.discard()

    def _collectives(self) -> TensorFlowCollectives:
        return TensorFlowCollectives(mpi_ops.global_process_set)

    def _reduced_over(self) -> Mapping[str, Sequence[int]]:
        wrapped = {name: distribution_of(each) for name, each in self._optimizers().items()}
        return {name: each.process_set.ranks for name, each in wrapped.items() if each is not None}


class ObjectState(_VariablesState):
    """Elastic state of picklable objects.

    Args:
        bcast_object: broadcasts an object from rank 0; default: hvdkit's `broadcast_object`.
        get_rank: returns this rank; default: `hvd.rank`.
        kwargs: picklable objects, and `hvd.ResumableSampler`s; they become attributes. Objects
            are replaced by copies at a start, samplers get the position.

    Raises:
        UsageError: an object must not be replaced by a copy, such as an optimizer or a variable.
    """

    def _all_variables(self) -> Sequence[Any]:
        return ()


class TensorFlowKerasState(_VariablesState):
    """Elastic state of a Keras model, its optimizer, and any picklable objects.

    Args:
        model: a built model.
        optimizer: default: the optimizer of `model.compile`, also if this one is a
            `LossScaleOptimizer` around the given one. It is built here if necessary, so that old
            and new ranks have the same variables. The state does not contain further optimizers of
            the model: for several, use `TensorFlowState` with a dict, or `hvdkit.keras`'s
            `KerasState`.
        backend: for compatibility with Horovod; ignored.
        kwargs: further objects and samplers, as of `ObjectState`.

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
        self.optimizer = outermost(model, optimizer)
        # An optimizer that is built without variables, for a frozen model, could train nothing.
        unbuilt = self.optimizer is not None and getattr(self.optimizer, "built", True) is False
        if unbuilt and model.trainable_variables:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy everything to host memory, except accumulated gradients.

        Raises:
            UsageError: the model was compiled again after the state was made.
        """
        check_compiled(self.model, self.optimizer)
        super().save()

    def _all_variables(self) -> Sequence[Any]:
        return [*self.model.variables, *_variables_of(self.optimizer)]

    def _optimizers(self) -> Mapping[str, Any]:
        return {"optimizer": self.optimizer}

    def _originals(self) -> Iterable[Any]:
        return [*super()._originals(), self.model]


def _variables_of(optimizer: Any) -> Sequence[Any]:
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer_variables(optimizer)
    variables = getattr(optimizer, "variables", ())
    # A method before Keras 3.
    return variables() if callable(variables) else variables


class TensorFlowState(_VariablesState):
    """Elastic state of a list of variables, and of any picklable objects.

    Args:
        variables: a list of `tf.Variable`s and `keras.Variable`s; None: no variables. Pass
            optimizers as `optimizer`: an optimizer without its first step has no variables such as
            the momentum, and a list that was made then lacks them.
        session: for compatibility with Horovod; must be None.
        optimizer: a built optimizer of Keras, or a dict from name to optimizer. The state then
            contains its variables, and the state of its reduction if `hvd.DistributedOptimizer`
            has wrapped it. The variables may also be in `variables`.
        kwargs: further objects and samplers, as of `ObjectState`.

    Raises:
        UsageError: `session` is not None, `variables` is an empty list, or an optimizer is not
            built.
    """

    def __init__(
        self,
        variables: Sequence[Any] | None = None,
        session: Any = None,
        *,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if session is not None:
            raise UsageError("session is given, but TensorFlow 2 has no sessions: omit it")
        self.variables = list(variables or ())
        if variables is not None and not self.variables:
            raise UsageError(
                "variables is an empty list, as of a model that is not built: expected variables. "
                "Call model.build(input_shape) first, or omit variables"
            )
        self._given_optimizers = several("optimizer", optimizer)
        for name, each in self._given_optimizers.items():
            if getattr(each, "built", True) is False:
                raise UsageError(
                    f"{name} is a {type(each).__name__} that is not built and has no variables: "
                    f"call its build(model.trainable_variables) before TensorFlowState"
                )
        super().__init__(**kwargs)

    def _all_variables(self) -> Sequence[Any]:
        optimizers = [v for each in self._given_optimizers.values() for v in _variables_of(each)]
        return list({id(tf_variable(v)): v for v in [*self.variables, *optimizers]}.values())

    def _optimizers(self) -> Mapping[str, Any]:
        return self._given_optimizers
