"""Reduction rounds of one optimizer.

In a round every rank reduces every bucket of the optimizer once. `hvdkit.core.coordination`
decides, on all ranks alike, which optimizers have a round; this module performs it. The names of
collectives are the same in every round, so Horovod's response cache has them.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdkit.core.accumulation import Window
from hvdkit.core.collectives import Collectives
from hvdkit.core.synchronizer import Synchronizer

Synchronizers = Sequence[Synchronizer[Any, Any]]


class LocalGradients(Protocol):
    """The gradients of this rank. An adapter implements this protocol."""

    def signature(self, assigned: bool) -> Sequence[object]:
        """Return values that must be equal on all ranks in a round, such as `requires_grad`.

        Args:
            assigned: see `begin_round`.
        """
        ...

    def explain(self) -> str:
        """Describe the signature, for an error."""
        ...

    def removed(self) -> bool:
        """Return whether the script has removed all gradients that the last round left."""
        ...

    def has_new(self, assigned: bool) -> bool:
        """Return whether a gradient has changed since its last reduction by a backward pass.

        Args:
            assigned: whether a gradient that the script has assigned counts as well.
        """
        ...

    def changed(self) -> bool:
        """Return whether a gradient differs from the result of the last round."""
        ...

    def moved(self) -> bool:
        """Return whether parameters have another dtype or device than the buckets."""
        ...

    def replan(self) -> None:
        """Create new synchronizers for the current parameters. Not a collective."""
        ...

    def add_trainable(self) -> bool:
        """Create a synchronizer for newly trainable parameters; return whether there are any."""
        ...

    def are_equal(self) -> bool:
        """Return whether reduced gradients are bit-identical on all ranks. A collective."""
        ...

    def count_changed_as_new(self) -> None:
        """Count gradients that the script has written in place as new ones."""
        ...

    def begin_round(self, assigned: bool) -> None:
        """Keep the reduced part of each gradient apart, and leave the new part for the round.

        Until `end_round`, the other methods ignore the zeros that packing assigns to parameters
        without a gradient.

        Args:
            assigned: whether a gradient that the script has assigned is new; otherwise it counts
                as reduced.
        """
        ...

    def end_round(self) -> None:
        """Add the gradients that `begin_round` kept apart to the reduced ones."""
        ...

    def end_step(self) -> None:
        """Count the current gradients, which a step has used, as reduced ones."""
        ...

    def is_busy(self) -> bool:
        """Return whether a backward pass is adding to the gradients."""
        ...

    def is_sparse(self) -> bool:
        """Return whether there is a sparse gradient in a dense bucket."""
        ...

    def make_sparse(self) -> None:
        """Make these gradients sparse on every rank, and plan new buckets. A collective."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply the gradients by `factor`: the reduction of a single rank."""
        ...

    def invalidate(self, reason: str) -> None:
        """Record why the gradients cannot be used, and drop the part that is kept apart."""
        ...

    def used(self) -> Sequence[int]:
        """Return 1 for each parameter with a gradient, else 0; empty without `find_unused`."""
        ...

    def drop_unused(self, used: Sequence[int]) -> None:
        """Remove the gradients of parameters whose entry in `used` is 0."""
        ...


class Rounds:
    """The rounds of one optimizer, and the position of this rank in them.

    Args:
        collectives: of the ranks to reduce over.
        gradients: of this rank.
        synchronizers: of the optimizer; `gradients` extends this list.
        window: the accumulation window.
        compare: called once, after the ranks have agreed for the first time, to compare more. It
            may raise on every rank. All ranks pass it, or none.

    Attributes:
        gradients: as given.
        caught_up: whether this rank has taken part in a round since its last step.
        may_add: whether the script may have added gradients since the last round without a
            reduction, for example in `no_sync`. The same on all ranks.
        has_late_ranks: whether a rank has entered a round of this step at a step, without a pass.
            All ranks then send a header at the step of this optimizer.
    """

    def __init__(
        self,
        collectives: Collectives,
        gradients: LocalGradients,
        synchronizers: Synchronizers,
        window: Window,
        compare: Callable[[], None] | None = None,
    ) -> None:
        self.gradients = gradients
        self.caught_up = False
        self.has_late_ranks = False
        self.may_add = False
        self._collectives = collectives
        self._synchronizers = synchronizers
        self._window = window
        self._compare = compare
        self._compared = False
        self._generation: int | None = None
        self._step = 0
        self._number = 0
        # For each started synchronizer: waits for the number of ranks that use each parameter.
        self._used: list[Callable[[], list[int]]] = []

    # --- the position of this rank --------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on the buckets."""
        return all(synchronizer.agreed for synchronizer in self._synchronizers)

    @property
    def moved(self) -> bool:
        """Whether parameters have another dtype or device than the buckets agreed on."""
        return self.agreed and not self._collectives.alone and self.gradients.moved()

    @property
    def in_windows(self) -> bool:
        """Whether gradients are divided by the passes of a window, also on a single rank."""
        return self._window.size > 1

    @property
    def new(self) -> bool:
        """Whether there are gradients that were not reduced."""
        return self.gradients.has_new(assigned=not self.caught_up)

    def begin_generation(self) -> None:
        """Reset the position after another `init`, or after `join`."""
        if self._generation != self._collectives.generation:
            # Some ranks may be new, so all of them begin at 0.
            self._generation = self._collectives.generation
            self._compared = False
            self._reset_place()

    def digest(self) -> int:
        """Return a 24-bit digest of the step, the round and the required gradients."""
        # With 24 bits, the sum of squares of 30,000 ranks fits into 64 bits.
        place = (self._step, self._number, self._window.passes, self.has_late_ranks)
        signature = self.gradients.signature(not self.caught_up)
        return zlib.crc32(repr((*place, *signature)).encode()) & 0xFFFFFF

    def explain(self, where: str) -> str:
        """Describe the values of `digest`, for an error.

        Args:
            where: where this rank is, such as "in a backward pass".
        """
        passes = self._window.passes
        return (
            f"step {self._step + 1}, reduction {self._number + 1}, {where}"
            + (f", pass {passes} of its window" if passes else "")
            + f"; {self.gradients.explain()}"
        )

    def end_step(self) -> None:
        """Record a step of the optimizer."""
        if not self._collectives.alone:
            self.gradients.end_step()
        self._step += 1
        self._number = 0
        self.caught_up = self.has_late_ranks = self.may_add = False

    def _reset_place(self) -> None:
        self._used = []
        self._step = self._number = 0
        self.caught_up = self.has_late_ranks = self.may_add = False

    # --- a round --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Keep the reduced part of the gradients apart."""
        self.gradients.begin_round(not self.caught_up)

    def agree(self) -> None:
        """Agree with the other ranks on the buckets. A collective.

        Raises:
            RankMismatchError: on every rank, if parameters or settings differ.
        """
        if self.gradients.moved():
            self.gradients.replan()
        for synchronizer in self._synchronizers:
            if not synchronizer.agreed:
                synchronizer.agree()
        if self._compare is None:
            return
        # A rank that had joined before its first step has not compared yet.
        (compared,) = self._collectives.max([int(self._compared)], "hvdkit.rounds.compared")
        try:
            if not compared:
                self._compare()
        except BaseException:
            self.agree_again()
            raise
        self._compared = True

    def agree_again(self) -> None:
        """Let the next round begin with `agree`, including the comparison of values."""
        self._compared = False
        for synchronizer in self._synchronizers:
            synchronizer.forget()

    def send(self) -> None:
        """Start the buckets that have not started. Call `agree` before."""
        self._send(len(self._synchronizers))

    def complete(self, moved: bool, sparse: bool) -> None:
        """Wait for all buckets. Afterwards every gradient is final. A collective.

        Args:
            moved: the parameters of all ranks have another dtype or device than the buckets.
            sparse: a rank has a sparse gradient in a dense bucket.
        """
        if moved:
            self.gradients.replan()
            for synchronizer in self._synchronizers:
                synchronizer.agree()
            self.send()
        used = self._wait(len(self._synchronizers))
        known = len(self._synchronizers)
        if self.gradients.add_trainable():
            for synchronizer in self._synchronizers[known:]:
                synchronizer.synchronize()
        if sparse:
            self.gradients.make_sparse()
        if used:
            self.gradients.drop_unused(used)
        self.gradients.end_round()
        self._number += 1
        self.caught_up = True
        self.may_add = False

    @property
    def plans_agreed(self) -> int:
        """The number of synchronizers, from the first one on, that the ranks have agreed on."""
        agreed = [synchronizer.agreed for synchronizer in self._synchronizers]
        return agreed.index(False) if False in agreed else len(agreed)

    def abandon(self, plans: int) -> None:
        """Wait for the buckets of a void round. A collective.

        Args:
            plans: the number of synchronizers that all ranks have agreed on.
        """
        self._send(plans)
        self._wait(plans)

    def reset(self, same_parameters: bool, reason: str) -> None:
        """Reset the position after an error on all ranks.

        Args:
            same_parameters: whether ranks certainly have equal parameters.
            reason: why the gradients cannot be used.
        """
        self._reset_place()
        self.gradients.invalidate(reason)
        if not same_parameters:
            self.agree_again()

    def reduce_alone(self) -> None:
        """Reduce the gradients of a single rank: divide them by the passes of the window."""
        self.begin()
        if self._window.divisor != 1:
            self.gradients.scale(1.0 / self._window.divisor)
        self.gradients.end_round()
        self.caught_up = True

    def complete_deferred(self) -> None:
        """Complete requests that wire formats have deferred to the next round."""
        for synchronizer in self._synchronizers:
            synchronizer.complete_deferred()

    def _send(self, plans: int) -> None:
        """Start the buckets of the first `plans` synchronizers that have not started."""
        used = self.gradients.used()
        start = 0
        for k, synchronizer in enumerate(self._synchronizers[:plans]):
            end = start + len(synchronizer.specs)
            if used and k == len(self._used):
                name = f"{synchronizer.name}.used"
                self._used.append(self._collectives.start_sum(used[start:end], name))
            synchronizer.send()
            start = end

    def _wait(self, plans: int) -> list[int]:
        """Wait for the first `plans` synchronizers; return how many ranks use each parameter."""
        used, self._used = self._used, []
        for synchronizer in self._synchronizers[:plans]:
            synchronizer.wait()
        return [count for result in used[:plans] for count in result()]
