"""The ranks that are late in `hvd.init()`, from drawn starts of Horovod."""

from hypothesis import given
from hypothesis import strategies as st

from hvdkit.launch.control.start_watch import late_start
from hvdkit.launch.ending.events import InHorovod, Resumed

TIMEOUT = 60.0


@given(
    size=st.integers(2, 5),
    starts=st.integers(1, 3),
    connects=st.booleans(),
    pauses=st.lists(st.floats(1.0, 100.0), max_size=2),
    data=st.data(),
)
def test_the_rank_that_does_not_start_is_late(size, starts, connects, pauses, data):
    """It does not call the last `hvd.init()`, or its call does not connect it."""
    late, notes = data.draw(st.integers(0, size - 1)), []
    for start in range(1, starts + 1):
        began = 1000.0 * start
        entered = {rank: began + data.draw(st.integers(0, 50)) for rank in range(size)}
        last = max(entered.values())
        is_last = start == starts
        for rank in range(size):
            if rank != late or not is_last or connects:
                notes.append(InHorovod(entered[rank], rank, start, False))
            if not is_last or (connects and rank != late):
                notes.append(InHorovod(last + 1, rank, start, True))
        if not is_last:
            assert late_start(size, notes, (), TIMEOUT) is None
    resumed = [Resumed(began + 55.0, seconds) for seconds in pauses]
    # Pauses before the last start do not matter.
    resumed.insert(0, Resumed(began - 1.0, 500.0))
    order = data.draw(st.permutations(range(size)))
    notes.sort(key=lambda note: (note.at, order[note.rank]))
    found = late_start(size, notes, resumed, TIMEOUT)
    first = min(at for rank, at in entered.items() if rank != late)
    since = last if connects else first
    assert (found.ranks, found.registered) == ((late,), connects)
    assert found.due == since + TIMEOUT + sum(pauses)


def test_there_is_no_limit_before_the_first_rank():
    assert late_start(2, (), (), TIMEOUT) is None
