"""Adapt compiled models and loss scaling to wrapped optimizers, and load models.

Keras has no hooks for this. Importing hvdkit.keras wraps `Trainer.compile` and
`LossScaleOptimizer.__init__`. Models and optimizers that do not use hvdkit are unchanged.
"""

import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras.optimizers import LossScaleOptimizer
from keras.src.trainers.trainer import Trainer

from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.distribution import Distribution, distribution_of, used_by
from hvdkit.keras.further_optimizers import further_optimizers
from hvdkit.keras.multi_optimizer import optimizers_inside
from hvdkit.keras.optimizer import DistributedOptimizer
from hvdkit.keras_variables.loss_scaling import inner_optimizers

log = logging.getLogger("hvdkit.keras")

_KERAS_2_ARGUMENT = "experimental_run_tf_function"

_logged: set[str] = set()

# Model -> the `Distribution` of each of its optimizers when its training function was traced.
_traced_for: "weakref.WeakKeyDictionary[Any, list[Distribution]]" = weakref.WeakKeyDictionary()


def wrap_compile() -> None:
    """Wrap `Trainer.compile` and `LossScaleOptimizer.__init__`, unless that has been done."""
    if not hasattr(Trainer.compile, "_hvdkit"):
        Trainer.compile = _compiling(Trainer.compile)
    if not hasattr(LossScaleOptimizer.__init__, "_hvdkit"):
        LossScaleOptimizer.__init__ = _scaling(LossScaleOptimizer.__init__)


def _compiling(original: Any) -> Any:
    @functools.wraps(original)
    def compile(self: Any, *args: Any, **options: Any) -> None:
        optimizer = args[0] if args else options.get("optimizer")
        if _KERAS_2_ARGUMENT in options and distribution_of(optimizer) is not None:
            # The Keras examples of Horovod's documentation pass this argument.
            del options[_KERAS_2_ARGUMENT]
            if _KERAS_2_ARGUMENT not in _logged and backend.hvd.rank() == 0:
                log.info("compile ignores %s, which Keras 3 does not have", _KERAS_2_ARGUMENT)
            _logged.add(_KERAS_2_ARGUMENT)
        original(self, *args, **options)
        used_by(self).clear()
        adapt(self)

    compile._hvdkit = True  # type: ignore[attr-defined]
    return compile


def _scaling(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, inner_optimizer: Any, *args: Any, **options: Any) -> None:
        original(self, inner_optimizer, *args, **options)
        # Keras calls the inner optimizer only if gradients are finite on this rank, so the
        # LossScaleOptimizer must reduce them first.
        inside = [inner_optimizer, *inner_optimizers(inner_optimizer).values()]
        found = list(dict.fromkeys(d for e in inside if (d := distribution_of(e)) is not None))
        if len(found) > 1:
            kind = type(inner_optimizer).__name__
            raise UsageError(
                f"{len(found)} optimizers in the {kind} are wrapped with hvd.DistributedOptimizer, "
                f"and a LossScaleOptimizer, which Keras adds for mixed_float16, is around it. It "
                f"needs one reduction: wrap the {kind} itself, and not the optimizers in it"
            )
        for distribution in found:
            distribution.hook(self)

    __init__._hvdkit = True  # type: ignore[attr-defined]
    return __init__


def fit_optimizers(model: Any) -> dict[str, Any]:
    """Return the optimizers that `fit` may use, by name; that of `compile` first.

    A model may have further optimizers as attributes, as a GAN, or nested models with optimizers.
    An optimizer may have others in it, as a Lookahead.
    Keras's own `train_step` does not use optimizers of nested models, such as a loaded model that
    is a part of another model.
    """
    own = getattr(model, "optimizer", None)
    nested = not getattr(model, "compiled", False) or has_own_step(model)
    return ({} if own is None else {"optimizer": own}) | further_optimizers(model, nested)


def distributions_of(model: Any) -> list[Distribution]:
    """Return the `Distribution` of each wrapped optimizer that `fit` may use.

    That of `compile` is first. See `fit_optimizers`. Those of other optimizers that a `train_step`
    uses, such as global ones, follow. They are unknown before the first batch.

    Raises:
        UsageError: optimizers in a `MultiOptimizer` are wrapped.
    """
    optimizers = fit_optimizers(model).values()
    if any(distribution_of(inner) for each in optimizers for inner in optimizers_inside(each)):
        raise UsageError(
            "optimizers in a MultiOptimizer are wrapped with hvd.DistributedOptimizer: wrap the "
            "MultiOptimizer itself, and not the optimizers in it"
        )
    found = [distribution_of(each) for each in optimizers]
    own = [each for each in found if each is not None]
    return list(dict.fromkeys([*own, *(used_by(model) if has_own_step(model) else ())]))


def main_optimizer(model: Any) -> Any:
    """Return the optimizer of `compile`, or the first wrapped one if only further ones are wrapped.

    A GAN may train with further optimizers only. Keras then still makes a default optimizer in
    `compile`, which trains nothing. A Lookahead may contain the wrapped optimizer.
    """
    wrapped = [each for each in fit_optimizers(model).values() if distribution_of(each) is not None]
    own = getattr(model, "optimizer", None)
    return wrapped[0] if wrapped and distribution_of(own) is None else own


def reduced_over(optimizers: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Return the ranks that each wrapped optimizer reduces over, by its name."""
    found = {name: distribution_of(each) for name, each in optimizers.items()}
    return {name: each.process_set.ranks for name, each in found.items() if each is not None}


def is_built(model: Any) -> bool:
    """Return whether all weights of a model exist.

    A model with its own `train_step`, such as a GAN, may have no `call`. It is then never built
    itself, but its layers are.
    """
    if model.built:
        return True
    layers = model._flatten_layers(include_self=False)
    all_built = bool(model.layers) and all(layer.built for layer in layers)
    return all_built and has_own_step(model) and type(model).build is keras.Model.build


def has_own_step(model: Any) -> bool:
    """Return whether a model has a custom `train_step`."""
    module = getattr(type(model).train_step, "__module__", "")
    return not module.startswith("keras.")


def adapt(model: Any) -> None:
    """Prepare a model whose training step contains Horovod's operations.

    Compile the training step without XLA; `evaluate` and `predict` are unchanged. A training
    function that was traced before an optimizer was wrapped is traced again.
    """
    distributions = distributions_of(model)
    if backend.NAME != "tensorflow" or not (distributions or has_own_step(model)):
        return
    if _traced_for.get(model) != distributions:
        model.train_function = None
    _traced_for[model] = distributions
    if not model.jit_compile or model.train_function is not None:
        return
    if "jit_compile" not in _logged and backend.hvd.rank() == 0:
        log.info(
            "the training step is compiled without XLA (jit_compile=False), because XLA cannot "
            "compile Horovod's operations"
        )
    _logged.add("jit_compile")
    model.jit_compile = False
    try:
        # `fit` uses this function.
        model.make_train_function()
    finally:
        model.jit_compile = True


def finalize(model: Any) -> None:
    """Update constants that layers have computed from their variables.

    On TensorFlow a `Normalization` computes constants from its adapted variables, and traced
    functions contain them. Keras does the same when it loads a file.
    """
    layers = [
        layer
        for layer in getattr(model, "_flatten_layers", tuple)()
        if callable(getattr(layer, "finalize_state", None)) and layer.built and layer.weights
    ]
    if not layers:
        return
    for layer in layers:
        layer.finalize_state()
    model.test_function = model.predict_function = None
    if getattr(model, "train_function", None) is not None:
        # Made again immediately, because `fit` may be running.
        model.train_function = None
        adapt(model)
        model.make_train_function()


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = backend.hvd.Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a saved Keras model, and wrap its optimizer with `DistributedOptimizer`.

    Args:
        filepath: as for `keras.models.load_model`.
        custom_optimizers: custom optimizer classes of the model.
        custom_objects: as for `keras.models.load_model`.
        compression: as for `DistributedOptimizer`.
        legacy_opts: for compatibility with Horovod; must be False.
        options: further arguments of `DistributedOptimizer`.

    Raises:
        UsageError: as for `DistributedOptimizer`.
    """
    if legacy_opts:
        raise UsageError("legacy_opts is True, but Keras 3 has no legacy optimizers: omit it")
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
        adapt(model)
    return model
