"""Objects that some ranks cannot pickle or unpickle."""

#: This rank. A test sets it.
own_rank = -1


class NotPicklable:
    """An object that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("it has a socket")


class NotLoadable:
    """An object that one rank cannot unpickle, as if its class were missing there.

    Args:
        rank: this rank.
    """

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return _load, (self.rank,)


class NeedsMemory:
    """An object that one rank cannot unpickle, because its memory is full.

    Args:
        rank: this rank.
    """

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return _allocate, (self.rank,)


def _load(rank):
    if own_rank == rank:
        raise ModuleNotFoundError("No module named 'of_another_host'")


def _allocate(rank):
    if own_rank == rank:
        raise MemoryError


def objects_and_errors(rank):
    """Return the objects of a rank, each with the error that all ranks must raise.

    Args:
        rank: this rank. Rank 1 cannot pickle, and rank 0 cannot unpickle.
    """
    global own_rank
    own_rank = rank
    return [
        (NotPicklable() if rank == 1 else 0, r"rank 1: TypeError: it has a socket"),
        (NotLoadable(0), r"rank 0: ModuleNotFoundError: No module named 'of_another_host'"),
        (NeedsMemory(0), r"rank 0: MemoryError"),
    ]
