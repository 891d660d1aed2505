"""Find ranks that train the same data, for example because a sampler was forgotten.

Ranks with equal weights compute equal gradients and losses, to the last bit, only from equal
batches. So each rank makes a digest of its own in its first passes, before any reduction. The ranks
gather the digests once. Later passes cost nothing.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import gather, grouped, name_ranks, ranks_by_value

#: The number of backward passes whose gradients are in the digest. One pass is not enough: a batch
#: may be the same by chance, for example in a small data set.
PASSES = 3
#: The digests are gathered with the first comparison of replicas that is due by this step.
LAST_STEP = 10

#: Description of a shuffled sampler that this rank has iterated over -> its seed.
seeds: dict[str, int] = {}

_log = logging.getLogger("hvdkit")


@dataclass
class SameData:
    """Compare the gradients or losses of the first passes between ranks.

    Attributes:
        collectives: the collectives of the ranks.
        digest: returns this rank's digest, of 64 bits; None if there is nothing to compare. It is
            called once, and is None afterwards.
        subject: what the digest is of: "gradients".
        advice: what to do if ranks have the same data.
    """

    collectives: Collectives
    digest: Callable[[], int | None] | None
    subject: str
    advice: str

    def compare(self) -> None:
        """Warn if ranks have equal digests. A collective; later calls make one small sum."""
        own = None if self.digest is None else self.digest()
        self.digest = None
        ranks = self.collectives.ranks
        (having,) = self.collectives.sum([int(own is not None)], "hvdkit.same_data")
        # Ranks in `join` contribute 0. Ranks that started later have no digest of the same steps.
        if having < len(ranks):
            return
        assert own is not None
        told = gather(self.collectives, [own, seeds], "hvdkit.same_data.all")
        if self.collectives.is_first:
            digests = {rank: digest for rank, (digest, _) in told.items()}
            warn_of_equal(digests, self.subject, self.advice)
            _report_seeds({rank: seeds for rank, (_, seeds) in told.items()})


def warn_of_equal(digests: dict[int, int], subject: str, advice: str) -> None:
    """Warn of ranks with equal digests. Not a collective.

    Args:
        digests: rank -> the digest of its first passes.
        subject: see `SameData`.
        advice: see `SameData`.
    """
    same = [name_ranks(ranks) for ranks in ranks_by_value(digests).values() if len(ranks) > 1]
    if same:
        _log.warning(
            "in each of the first %d passes, %s computed the same %s, to the last bit, so they "
            "train the same data. %s",
            *(PASSES, "; ".join(same), subject, advice),
        )


def _report_seeds(seeds_of: dict[int, dict[str, int]]) -> None:
    """Warn of samplers that have another seed on each rank."""
    first = next(iter(seeds_of.values()))
    for sampler in first:
        found = {rank: of_rank.get(sampler) for rank, of_rank in seeds_of.items()}
        if None not in found.values() and len({*found.values()}) > 1:
            texts = grouped({rank: f"seed {seed}" for rank, seed in found.items()})
            _log.warning(
                "ranks shuffle with different seeds (%s; %s), so some samples are on several ranks "
                "and others on none. Pass the same seed= to hvd.DistributedSampler on all ranks",
                *(sampler, "; ".join(texts)),
            )
