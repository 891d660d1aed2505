"""The position of the training by `fit`, and what a checkpoint within an epoch contains."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.checkpoint.state import Tree
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.fit.resuming import EpochSize
from hvdkit.keras.items import OwnVariables, metric_variables

log = logging.getLogger("hvdkit.keras")


@dataclass(frozen=True)
class Position:
    """A position of the training, the same on all ranks.

    Attributes:
        step: the number of batches that each rank has trained.
        epoch: the current epoch, or the next one between two epochs.
        batches: the number of batches of this epoch that are trained.
        stopped: whether `stop_training` has ended the training.
        saved_size: the size of an epoch in the job that saved the restored checkpoint.
    """

    step: int = 0
    epoch: int = 0
    batches: int = 0
    stopped: bool = False
    saved_size: EpochSize | None = None

    def after(self, batches: range) -> Position:
        """Return the position after these batches of the epoch."""
        return replace(self, step=self.step + len(batches), batches=batches.stop)

    def before(self, epoch: int) -> Position:
        """Return the position before the first batch of an epoch."""
        return replace(self, epoch=epoch, batches=0)

    @property
    def read(self) -> int:
        """The number of batches that have been read, in batches of the current number of ranks."""
        ranks = backend.hvd.size()
        return self.step * (self.saved_size.ranks if self.saved_size else ranks) // ranks

    def resumed(self, data: Any, epoch_steps: int | None) -> tuple[Position, bool]:
        """Return the position in this job, and whether a part of its epoch is trained.

        With more ranks than before, the remaining samples may round up to as many batches as the
        whole epoch has. Then `batches` is 0, although a part of the epoch is trained.

        Args:
            data: the sampler, at this position. None: keep the same fraction of the epoch.
            epoch_steps: batches of an epoch; None if unknown.
        """
        if not self.batches:
            return self, False
        if data is not None and not data.batches_left:
            # With more ranks than before, `drop_last` leaves out all remaining samples.
            data.end_epoch()
            return self.before(self.epoch + 1), False
        if data is not None:
            return replace(self, batches=data.batches_per_epoch - data.batches_left), True
        batches = self.batches
        if self.saved_size is not None:
            size = EpochSize(epoch_steps, backend.hvd.size())
            batches = size.resumed_after(batches, self.saved_size)
        if batches == epoch_steps:
            # A script has committed after the last batch. Keras has no epochs without batches.
            return self.before(self.epoch + 1), False
        return replace(self, batches=batches), batches > 0


@dataclass
class Progress:
    """A `StatefulItem`: the position in one call of `fit`.

    Attributes:
        fit: the number of calls of `fit` with this callback.
        epoch_steps: batches of an epoch; None if unknown.
        position: the position now.
        epoch_began: the random states at the beginning of the epoch. A resume without a sampler
            needs them to read the same data again. None with a sampler, or between two epochs.
    """

    fit: int = 0
    epoch_steps: int | None = None
    position: Position = Position()
    epoch_began: Tree = None

    def save(self) -> Tree:
        """Return the position, which is the same on all ranks."""
        position = self.position
        return {
            "step": position.step,
            "fit": self.fit,
            "epoch": position.epoch,
            "batches": position.batches,
            "epoch_steps": self.epoch_steps,
            "ranks": backend.hvd.size(),
            "stopped": position.stopped,
        }

    def plan_restore(self, tree: Tree) -> Tree:
        """Check that the checkpoint was saved in the same call of `fit`.

        Raises:
            UsageError: the checkpoint was saved in another call.
        """
        # Earlier versions did not save the number of the call.
        saved = tree.get("fit", self.fit)
        if saved != self.fit:
            raise UsageError(
                f"the checkpoint was saved in call {saved} of fit with this callback, and this is "
                f"call {self.fit}. Use another callback and another folder for each call of fit"
            )
        return tree

    def restore(self, tree: Tree) -> None:
        """Restore the position."""
        # Checkpoints of earlier versions lack the number of ranks.
        size = EpochSize(tree["epoch_steps"], tree.get("ranks", backend.hvd.size()))
        place = (tree["step"], tree["epoch"], tree["batches"], tree["stopped"])
        self.position = Position(*place, size)

    def restore_epoch_began(self, tree: Tree) -> None:
        """Restore the random states at the beginning of the epoch."""
        self.epoch_began = tree


class EpochMetrics:
    """A `RankItem`: the state of this rank's metrics since the epoch began.

    Args:
        model: the model.
        progress: the progress of its `fit`.

    Attributes:
        restored: the state in the checkpoint, until the metrics exist.
    """

    def __init__(self, model: Any, progress: Progress) -> None:
        self._variables = OwnVariables(lambda: metric_variables(model))
        self._progress = progress
        self.restored: Tree = None

    def save(self) -> Tree:
        """Return the state; None between two epochs, because `fit` resets metrics then."""
        return self._variables.save() if self._progress.position.batches else None

    def restore(self, tree: Tree) -> None:
        """Keep the state until `fit` has reset the metrics."""
        self.restored = tree

    def apply(self) -> None:
        """Restore the state of the metrics."""
        if self.restored is not None:
            self._variables.restore(self.restored)


def warn_without_epochs(position: Position, epochs: int, location: str) -> None:
    """Warn if `fit` resumes and trains nothing.

    Args:
        position: where `fit` resumes, between two epochs.
        epochs: the number of epochs at the end of this `fit`.
        location: of the checkpoint.
    """
    if position.stopped:
        log.warning(
            "fit trains nothing: the run that saved the checkpoint in %s ended after epoch %d, "
            "because a callback set stop_training, as EarlyStopping does. To train more, write "
            "the weights to a file with hvdkit checkpoint export, load them, and use another "
            "folder. A callback for a time limit should not set stop_training: to save and "
            "resume later, send SIGUSR1 to the job",
            *(location, position.epoch),
        )
    elif position.epoch >= epochs:
        log.warning(
            "fit has no epochs left: the checkpoint in %s has %d epochs, and epochs=%d. To "
            "train more, increase epochs. Another call of fit needs another folder",
            *(location, position.epoch, epochs),
        )
