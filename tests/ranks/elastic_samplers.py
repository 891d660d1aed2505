"""The position of a `ResumableSampler` in an elastic state, for every framework."""

from itertools import chain

import numpy as np

from tests.commit_files import read_commit, write_commit

_SAMPLES = 40


def start(hvd, kind):
    """Return a sampler, and a state that has it, as a script does at each start."""
    sampler = hvd.ResumableSampler(_SAMPLES, 2, seed=3)
    return sampler, getattr(hvd.elastic, kind)(sampler=sampler, batch=0)


def check_that_a_commit_keeps_the_position(hvd, kind, commit):
    """Commit three batches to the file `commit`, start again, and train the other batches.

    The last rank has no commit, as on a host that was lost.
    """
    sampler, state = start(hvd, kind)
    state.sync()
    batches, trained = sampler.batches(), []
    for _ in range(3):
        trained += np.asarray(next(batches)).tolist()
        state.batch += 1
        state.commit()
    write_commit(state, commit)
    sampler, state = start(hvd, kind)
    if hvd.rank() < hvd.size() - 1:
        read_commit(state, commit)
        state.restore()
    state.sync()
    # The script's own sampler has the position.
    assert (state.batch, state.sampler) == (3, sampler)
    for batch in sampler.batches():
        trained += np.asarray(batch).tolist()
    assert sorted(chain(*hvd.allgather_object(trained))) == list(range(_SAMPLES))
