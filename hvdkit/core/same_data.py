"""Find ranks that train the same data, for example because a sampler was forgotten.

Ranks with equal weights compute equal gradients, to the last bit, only from equal batches. So each
rank makes a digest of its gradients in its first steps, before the reduction. The ranks gather the
digests once. Later steps cost nothing.
"""

import logging
from collections.abc import Callable

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import name_ranks

#: The number of backward passes whose gradients are in the digest. One pass is not enough: a batch
#: may be the same by chance, for example in a small data set.
PASSES = 3
#: The digests are gathered with the first comparison of replicas that is due by this step.
LAST_STEP = 10

_log = logging.getLogger("hvdkit")


class SameData:
    """Compare the gradients of the first steps between ranks.

    Args:
        collectives: the collectives of the ranks.
        digest: returns the digest of this rank's gradients; None without gradients, or if they are
            zero. It is called once.
        advice: what to do if ranks have the same data.
    """

    def __init__(
        self, collectives: Collectives, digest: Callable[[], int | None], advice: str
    ) -> None:
        self._collectives = collectives
        self._digest: Callable[[], int | None] | None = digest
        self._advice = advice

    def compare(self) -> None:
        """Warn if ranks have computed the same gradients. A collective; later calls do little."""
        own = None if self._digest is None else self._digest()
        self._digest = None
        ranks = self._collectives.ranks
        (having,) = self._collectives.sum([int(own is not None)], "hvdkit.same_data")
        # Ranks in `join` contribute 0. Ranks that started later have no digest of the same steps.
        if having < len(ranks):
            return
        assert own is not None
        gathered = self._collectives.allgather(own.to_bytes(8, "little"), "hvdkit.same_data.all")
        ranks_of: dict[bytes, list[int]] = {}
        for rank, data in zip(ranks, gathered, strict=True):
            ranks_of.setdefault(data, []).append(rank)
        same = [alike for alike in ranks_of.values() if len(alike) > 1]
        if same and self._collectives.rank == ranks[0]:
            _log.warning(
                "in each of the first %d backward passes, %s computed the same gradients, to the "
                "last bit, so they train the same data. %s",
                *(PASSES, "; ".join(map(name_ranks, same)), self._advice),
            )
