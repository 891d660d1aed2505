"""The gradients of one optimizer on this rank: which part of each one is reduced.

The state of a gradient is in its `Record`:

| state | `base` | `local` | `p.grad` |
|---|---|---|---|
| absent | - | no | None |
| assigned | - | no | what the script has assigned, if no round of this step has come before |
| reduced | - | no | what the last round has left |
| set aside | the reduced gradient | no | None, during a pass or a round |
| local | - or the reduced part | yes | what passes of this rank have added since |

| event | from | to |
|---|---|---|
| `separate`: a pass reaches the optimizer, or a round begins | reduced | set aside |
| | assigned | local |
| `accumulated`: a pass has added to it | any | local |
| `rejoin`: nothing was added to it, and there is no round | set aside | reduced |
| `end_round`: `p.grad` is reduced, and the base added | any | reduced, or absent |
| `end_step` | reduced, assigned | reduced |
| `reset`: `zero_grad()`, an error, a restore | any | absent, or assigned |

Only what is not reduced is reduced in a round. (A second reduction of the base would be wrong for
`Sum`, and would round it twice in a lossy wire format.) On one rank, both are the same: see
`_separates`.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from hvdkit.agreement.consistency import all_equal, digest24
from hvdkit.errors import HvdkitError
from hvdkit.reduction.nonfinite import IGNORE
from hvdkit.torch.digests import digests
from hvdkit.torch.divided_gradients import DividedGradient
from hvdkit.torch.dtensors import is_dtensor
from hvdkit.torch.reduction.last_stages import Stage
from hvdkit.torch.reduction.memory import is_nonzero
from hvdkit.torch.reduction.nonfinite import NonFiniteNames
from hvdkit.torch.reduction.parameters import Parameters
from hvdkit.torch.reduction.records import Left, Record, forget, is_changed, is_left, leave


def _base(record: Record) -> torch.Tensor:
    assert record.base is not None
    return record.base


class Gradients(Parameters):
    """The gradients of an optimizer's parameters, and what happens to them.

    Attributes, beside those of `Parameters`:
        invalid_reason: why the gradients cannot be used; empty if they can.
        left: the kind of gradients that the last round or step has left since `reset`. The script
            may have removed them itself.
        mixed: the names of gradients that the script has changed while their reduced part was set
            aside, or removed in a hook. The next round fails on all ranks.
        stages: the last stages of the gradients, in order.
    """

    def __post_init__(
        self,
        names: dict[torch.nn.Parameter, str],
        groups: Sequence[Sequence[torch.nn.Parameter]],
    ) -> None:
        super().__post_init__(names, groups)
        self._nonfinite = NonFiniteNames(self.settings.on_nonfinite != IGNORE)
        self.invalid_reason = ""
        self.left = Left.NOTHING
        self.stages: list[Stage] = []
        # The record whose hooks were called last in the current pass.
        self._latest: Record | None = None
        self.mixed: list[str] = []
        self.reset()  # another optimizer may have left gradients

    # --- converted parameters -------------------------------------------------------------------

    def _note_conversion(self, record: Record) -> None:
        self._find_converted_gradient(record)
        self._owner().after_conversion()

    def _find_converted_gradient(self, record: Record) -> None:
        """Find out whether the gradient of a parameter without hooks is reduced.

        A conversion removes hooks and marks, so a pass may have added to a reduced gradient. Then
        the mean over the ranks is still right, but their sum would count the reduced part once for
        each rank, and the last stages would change it again.
        """
        gradient = record.parameter.grad
        if gradient is None or record.local:
            return
        if self.left is Left.NOTHING or self._mean_of_reduced:
            record.local = True
            return
        leave(gradient, version=0)
        if is_changed(gradient):
            self.mixed.append(record.name)

    @property
    def _mean_of_reduced(self) -> bool:
        """Whether a second reduction of a reduced gradient does not change it."""
        mean = self.reduction.average or self.collectives.single_rank
        return bool(mean and self.window.divisor == 1 and not self.stages)

    def note_late(self, record: Record) -> bool:
        """Note that a pass has added to a gradient before its begin was noticed.

        Returns:
            Whether the gradient is new: it has no reduced part, and no part of earlier passes.
        """
        gradient = record.parameter.grad
        if record.local or gradient is None or not self._separates:
            return False
        if not is_left(gradient):
            return True
        record.local = True
        if not self._mean_of_reduced:
            self.mixed.append(f"{record.name}: added to, without a hook before")
        return False

    # --- in a backward pass ---------------------------------------------------------------------

    @property
    def has_buckets(self) -> bool:
        """Whether there are buckets, or the ranks have not agreed on them. False on one rank."""
        plans = [part.synchronizer.plan for part in self.parts]
        return any(plan is None or plan.buckets for plan in plans)

    @property
    def _separates(self) -> bool:
        """Whether the reduced part of a gradient must be known in the next round."""
        if self._owner().wrapped_again:
            return False  # the gradients belong to another optimizer
        return bool(
            not self.collectives.single_rank
            or self.window.divisor != 1
            or self.stages
            or self._nonfinite.checks
        )

    def begin_pass(self, participated: bool) -> None:
        """Set the reduced gradients aside before PyTorch adds to them.

        Args:
            participated: see `separate`.

        Raises:
            HvdkitError: the script has removed a gradient during an accumulation window.
        """
        if self.window.made:
            for record in self._planned:
                p = record.parameter
                if record.local and p.grad is None and p.requires_grad:
                    raise HvdkitError(self.window.removed_text(record.name))
        self.separate(participated)

    def separate(self, participated: bool) -> None:
        """Set the reduced gradients aside: leave only what is not reduced in `p.grad`.

        Args:
            participated: whether there was a round in this step. What the script has assigned since
                then counts as reduced.
        """
        if not self._separates:
            return
        for record in self._planned:
            gradient = record.parameter.grad
            if record.hooks_lost:
                self._find_converted_gradient(record)
            if record.local:
                if record.base is not None:
                    self._check_written(record, gradient)
            elif gradient is not None:
                divided = isinstance(gradient, DividedGradient)  # so it is reduced
                if participated or divided or is_left(gradient):
                    record.base, record.parameter.grad = gradient, None
                else:
                    record.local = True

    def _check_written(self, record: Record, gradient: torch.Tensor | None) -> None:
        """Look at a local gradient that the script may have changed while it had a base.

        If the script has removed it or set it to 0, it has done so with the base, too.
        """
        if gradient is None:
            record.base = None
        elif is_changed(gradient):
            if is_nonzero(gradient):
                self.mixed.append(record.name)
            record.base, record.parameter.grad, record.local = gradient, None, False

    def rejoin(self) -> None:
        """Make the bases the gradients again if nothing was added to them."""
        for record in self._planned:
            if record.base is not None and not record.local:
                if record.parameter.grad is None:
                    record.parameter.grad, record.base = record.base, None
                else:
                    record.local = True  # the parameter has lost its hooks

    @torch.no_grad()
    def make_written_local(self, count: int) -> None:
        """Make those bases local that the script has written: they differ. A collective.

        Args:
            count: the number of ranks that have not joined.
        """
        records = self._compared_bases()
        own = [digest & 0xFFFFFF for digest in digests([_base(record) for record in records])]
        sums = self.collectives.sum([*own, *(n * n for n in own)], "hvdkit.rounds.written")
        total, squares = sums[: len(own)], sums[len(own) :]
        for record, n, n2 in zip(records, total, squares, strict=True):
            if not all_equal(count, n, n2):
                record.add_base()
                record.local = True

    def accumulated(self, record: Record, ready: bool) -> None:
        """Record that a pass has added to a gradient.

        Args:
            record: the parameter's record.
            ready: whether the parameter's bucket may be sent when it is full.
        """
        self._settle()
        self._latest = record
        record.arrived += 1
        if record.part is None:
            return
        record.local = True
        if ready and not record.repeats:
            try:
                record.part.synchronizer.mark_ready(record.index)
            except HvdkitError:
                # The pass ends here, so it does not show which other gradients arrive again.
                for each in self._planned:
                    each.repeats = True
                raise

    def _settle(self) -> None:
        """Look at the latest gradient, after later hooks of the script and before it is packed."""
        record, self._latest = self._latest, None
        if record is None:
            return
        gradient = record.parameter.grad
        if gradient is None:
            self.mixed.append(f"{record.name}: a hook has set p.grad to None")
        elif self._nonfinite.checks:
            self._nonfinite.add(record.name, gradient)

    def end_pass(self, local: bool = False) -> bool:
        """End a pass. Return whether it has accumulated any gradient.

        If no round follows, restore the gradients that the pass has not reached. It has reached
        none in `torch.autograd.grad`, which only calls the hook before the accumulation.

        Args:
            local: whether no round follows.
        """
        self._settle()
        if any(part.synchronizer.is_changed for part in self.parts):
            self.mixed.append("a hook has changed the gradient of another parameter")
        any_arrived = False
        for record in chain(self._planned, self._unplanned()):
            if record.arrived:
                any_arrived = True
                record.repeats = record.repeats or record.arrived > 1
                record.arrived = 0
        if local or not any_arrived:
            self.rejoin()
        if local:
            self._nonfinite.clear()  # the next round looks at all local gradients
            for record in self._planned if self._separates else ():
                if record.base is not None and record.parameter.grad is not None:
                    leave(record.parameter.grad)
        return any_arrived

    # --- NaN and infinity -----------------------------------------------------------------------

    def check_finite(self, reduced: bool) -> None:
        """Look for NaN and infinity in gradients that the last pass has not computed.

        Args:
            reduced: whether the last round of this step has found some, so that the reduced
                gradients contain them unless the script has removed them.
        """
        if not self._nonfinite.checks:
            return
        for record in self.records.values():
            if record.base is not None and (reduced or is_changed(record.base)):
                self._nonfinite.add(f"{record.name} (reduced)", record.base)
            if record.local or (record.part is None and record.parameter.requires_grad):
                gradient = record.parameter.grad
                if gradient is not None and record.name not in self._nonfinite:
                    self._nonfinite.add(record.name, gradient)

    def nonfinite(self) -> list[str]:
        """Return the names of the unreduced gradients with NaN or infinity.

        Empty without `on_nonfinite`. In the order in which the gradients were computed.
        """
        return self._nonfinite.names()

    # --- what other ranks must know -------------------------------------------------------------

    def _bases(self) -> list[torch.Tensor]:
        return [record.base for record in self._planned if record.base is not None]

    def _compared_bases(self) -> list[Record]:
        """Return the records whose bases are equal on all ranks unless the script has changed them.

        Not those that are divided. The script can only multiply them, or set them to 0.
        """
        every = (record for record in self._planned if record.base is not None)
        return [record for record in every if not isinstance(record.base, DividedGradient)]

    def signature(self) -> Sequence[object]:
        """Return values that must be equal on all ranks in a round, after `separate`.

        They show which parameters need gradients, and which have reduced gradients.
        """
        # A frozen parameter gets a reduced gradient only on ranks where it has one already.
        needs = bytes(
            1 if record.parameter.requires_grad else 2 * record.has_gradient
            for record in self.records.values()
        )
        return needs, [place for place, r in enumerate(self._planned) if r.base is not None]

    def content(self) -> int:
        """Return 24 bits of the reduced gradients, after `separate`; 0 if there are none."""
        bases = [_base(record) for record in self._compared_bases()]
        return digest24(repr(digests(bases)).encode()) if bases else 0

    def any_changed(self) -> bool:
        """Return whether the script may have changed a reduced gradient since the last step."""
        return any(is_changed(_base(record)) for record in self._compared_bases())

    def exist(self) -> bool:
        """Return whether there is any gradient."""
        return any(record.parameter.grad is not None for record in self._planned)

    def any_nonzero(self) -> bool:
        """Return whether any gradient has a value other than 0. It waits for the device."""
        gradients = (record.parameter.grad for record in self._planned)
        return any(gradient is not None and is_nonzero(gradient) for gradient in gradients)

    @property
    def are_unused(self) -> bool:
        """Whether the last round left gradients that no step has used, by what hvdkit has seen."""
        return self.left in (Left.UNUSED, Left.UNSAVED)

    def all_removed(self) -> bool:
        """Return whether the last round left gradients, and the script has removed all of them."""
        return self.are_unused and not self.exist()

    def has_local(self) -> bool:
        """Return whether passes of this rank have added something that is not reduced."""
        return any(record.local for record in self._planned) or any(
            record.parameter.grad is not None for record in self._new()
        )

    def has_new(self) -> bool:
        """Return whether there are parameters that need a plan. The same on all ranks."""
        return any(True for _ in self._new())

    def _new(self) -> Iterator[Record]:
        return (record for record in self._unplanned() if record.parameter.requires_grad)

    def has_unreduced(self, participated: bool) -> bool:
        """Return whether there is something to reduce; `participated`: see `separate`."""
        return self.has_local() or (
            not participated and any(r.parameter.grad is not None for r in self._unplanned())
        )

    def needs_sparse_bucket(self) -> bool:
        """Return whether a sparse gradient has a dense bucket."""
        return not self.reduction.sparse_as_dense and any(
            part.needs_sparse_bucket() for part in self.parts
        )

    # --- in a round -----------------------------------------------------------------------------

    def begin_round(self, participated: bool, nonfinite: bool) -> None:
        """Begin a round without a pass of this rank; see `separate` and `check_finite`."""
        self.refresh()
        self.separate(participated)
        self.check_finite(nonfinite)

    def make_sparse(self) -> None:
        """Make gradients that are sparse on some rank sparse on all ranks. A collective.

        The next round reduces each of them in a sparse bucket.
        """
        for number, part in enumerate(self.parts):
            part.make_sparse(f"hvdkit.sparse.{number}")

    @torch.no_grad()
    def end_round(self) -> None:
        """Add the bases to the reduced gradients, and call the last stages."""
        for stage in reversed(self.stages):
            stage.undo(self._bases())
        for record in self._planned:
            if record.base is not None:
                record.add_base()
            record.local = False
        if self.settings.keep_sparse:
            for record in self._planned:
                gradient = record.parameter.grad
                if gradient is not None and not gradient.is_sparse:
                    record.parameter.grad = gradient.to_sparse(1)
        for stage in self.stages:
            gradients = (record.parameter.grad for record in self._planned)
            stage([gradient for gradient in gradients if gradient is not None])
        for record in self._planned:
            # FSDP2 may add to it before the next pass is noticed: see `note_late`.
            if record.parameter.grad is not None and is_dtensor(record.parameter):
                leave(record.parameter.grad)
        self._nonfinite.clear()
        if self.left is not Left.UNSAVED:
            self.left = Left.UNUSED if self.exist() else Left.NOTHING

    # --- the end of a step ----------------------------------------------------------------------

    def end_step(self) -> None:
        """Mark all current gradients as reduced, because a step has used them."""
        for record in self._planned if self._separates else ():
            gradient = record.parameter.grad
            if gradient is not None and not record.local:
                leave(gradient)
        self._nonfinite.clear()
        self.left = Left.USED if self.exist() else Left.NOTHING
        for stage in self.stages:
            stage.forget()

    def reset(self) -> None:
        """Drop the bases and all records of passes and rounds."""
        for record in chain(self._planned, self._unplanned()):
            record.base, record.local, record.arrived = None, False, 0
            if (gradient := record.parameter.grad) is not None:
                forget(gradient)
        for stage in self.stages:
            stage.forget()
        self.mixed.clear()
        self._latest = None
        self._nonfinite.clear()
        self.left = Left.NOTHING

    def invalidate(self, reason: str) -> None:
        """Record why the gradients cannot be used, and begin the next window."""
        self.invalid_reason = reason
        self.window.close()
        self.reset()

    def remove_unreduced(self) -> None:
        """Remove the gradients that are not reduced; all of them if they cannot be used."""
        for record in self._planned:
            if record.local or self.invalid_reason:
                record.parameter.grad = None
        for record in self._unplanned():
            if record.parameter.requires_grad:
                record.parameter.grad = None
