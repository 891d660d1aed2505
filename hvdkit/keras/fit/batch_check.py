"""Check before each training step of a `fit` that all ranks have a batch.

Without the check, ranks would wait for the gradients of a rank whose data have ended, and this rank
for the other ranks' metrics. On TensorFlow, the check is a part of the graph of a step, which reads
the batch. Importing hvdkit.keras calls `wrap_train_function`.
"""

import functools
import time
import weakref
from typing import Any

from hvdkit.agreement.consistency import group_by_text
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.models import distributions_of, has_own_step

_NAME = "hvdkit.keras.batch"
_LEFT = "fit was left with an error"


class BatchCheck:
    """Checks of one model. All ranks of the group make one, and turn it on and off together.

    Args:
        group: the collectives of the ranks.

    Attributes:
        group: as given.
        trained: the number of batches of this epoch that this rank has trained.
        together: the number of batches in an execution; `trained` may contain the whole last one.
        times: the step times of the model's wrapped optimizers.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.trained = 0
        self.together = 1
        self.times: list[Any] = []
        self._on = False
        self._in_graph: Any = None
        if backend.NAME == "tensorflow":
            self._in_graph = backend.batch_check(
                _NAME, group.process_set, lambda: self._fail(has_batch=True)
            )

    def turn(self, on: bool) -> None:
        """Turn the check on or off. Not a collective."""
        self.trained = 0
        self._on = on and not self.group.single_rank
        if self._in_graph is not None:
            self._in_graph.turn(self._on)

    def begins(self) -> None:
        """Check that all ranks have a batch. A collective.

        Raises:
            UsageError: on every rank, if the data of a rank have ended.
        """
        self._check(has_batch=True)

    def begins_in_graph(self, data: Any) -> Any:
        """Do the same in a graph of TensorFlow; see `hvdkit.tensorflow.batch_check`."""
        return self._in_graph(data, self.times)

    def ends(self) -> None:
        """Check that no rank begins a batch. A collective; called where other collectives follow.

        Raises:
            UsageError: on every rank, if other ranks have more batches. On TensorFlow, these ranks
                raise an error of TensorFlow with the same text.
        """
        self._check(has_batch=False)

    def enters(self) -> None:
        """Wait until all ranks call `fit`. A collective.

        An earlier `fit` may have raised an error on this rank only. Then the others call `begins`
        or `ends`, and raise an error, too.
        """
        if self.group.single_rank:
            return
        while True:
            count, _, entering = self._sums([1, 0, 1])
            if entering == count:
                return
            group_by_text(self.group, _LEFT, f"{_NAME}.who")

    def _sums(self, values: list[int]) -> list[int]:
        """Sum 1, whether this rank has a batch, and whether it begins a `fit`, over the ranks."""
        if self._in_graph is None:
            return list(self.group.sum(values, _NAME))
        began = time.monotonic()
        sums = self._in_graph.sums(values)
        for times in self.times:
            times.count_wait(time.monotonic() - began)
        return list(sums)

    def _check(self, has_batch: bool) -> None:
        if not self._on:
            return
        count, having, entering = self._sums([1, int(has_batch), 0])
        if entering or having not in (0, count):
            self._fail(has_batch)

    def _fail(self, has_batch: bool) -> None:
        mine = f"{self.trained} batches"
        if has_batch:
            mine = f"more than {mine}"
        elif self.together > 1:
            mine = f"at most {mine}"
        by_rank = "; ".join(group_by_text(self.group, mine, f"{_NAME}.who"))
        if _LEFT in by_rank:
            raise UsageError(
                f"some ranks have left fit with an error and call fit again, while other ranks "
                f"still train ({by_rank} in this epoch), so the job would hang. Raise such an "
                f"error on every rank"
            )
        raise UsageError(
            f"the data of some ranks have ended earlier than those of other ranks ({by_rank} in "
            f"this epoch), so the job would hang. Give all ranks the same number of batches: with "
            f"hvd.shard(data), with steps_per_epoch= for the rank with the fewest batches, or with "
            f"dataset.repeat() and steps_per_epoch=. Do not filter after hvd.shard"
        )


_checks: "weakref.WeakKeyDictionary[Any, BatchCheck]" = weakref.WeakKeyDictionary()


def batch_check_of(model: Any) -> BatchCheck:
    """Return the check of a model, over the ranks of its first wrapped optimizer."""
    distributions = distributions_of(model)
    group = distributions[0].collectives if distributions else backend.collectives()
    check = _checks.get(model)
    if check is None or check.group.process_set is not group.process_set:
        check = _checks[model] = BatchCheck(group)
    check.times = [distribution.times for distribution in distributions]
    return check


def wrap_train_function() -> None:
    """Wrap Keras's `_make_function` on TensorFlow, to check before each training step."""
    if backend.NAME != "tensorflow":
        return
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    original = TensorFlowTrainer._make_function
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _make_function(self: Any, step_function: Any) -> Any:
        return original(self, _checked(self, step_function))

    TensorFlowTrainer._make_function = _make_function


def _checked(model: Any, step_function: Any) -> Any:
    """Return the `train_step` of a model with a check before it; another function unchanged."""
    import tensorflow as tf

    if step_function != model.train_step or not backend.hvd.is_initialized():
        return step_function
    if tf.distribute.has_strategy() or not (distributions_of(model) or has_own_step(model)):
        return step_function

    @functools.wraps(step_function)
    def step(data: Any) -> Any:
        check = batch_check_of(model)
        if tf.executing_eagerly():
            check.begins()
            return step_function(data)
        with tf.control_dependencies([check.begins_in_graph(data)]):
            return step_function(data)

    return step
