"""The rank at fault is named, and a job without a fault is not disturbed.

See seeded.py and clean.py.
"""

import pytest

from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.unit.faults import clean, seeded, seeded_keras

_NAMED = 0.95
#: The largest growth of a process in 9,000 steps: threads, open files, and bytes of memory.
MOST_THREADS, MOST_FILES, MOST_MEMORY = 2, 2, 20e6


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", "keras-tensorflow"])
def test_the_rank_at_fault_is_named_in_nearly_all_cases(framework):
    skip_where_unsupported(Configuration(framework, "mpi", 4))
    cases = {"torch": seeded.CASES}.get(framework, seeded_keras.CASES)
    outcomes = list(seeded.run_all(cases))
    assert len(outcomes) >= 40
    wrong = [f"{o.case.name}, rank {o.rank}: {o.text[-3000:]}" for o in outcomes if not o.named]
    assert len(wrong) <= (1 - _NAMED) * len(outcomes), "\n\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize(("framework", "ranks"), [("torch", 4), ("keras", 2)])
def test_there_is_no_alarm_in_ten_thousand_clean_steps(tmp_path, framework, ranks):
    steps = 10_000
    adapter = {"keras": "keras-tensorflow"}.get(framework, framework)
    skip_where_unsupported(Configuration(adapter, "gloo", ranks))
    outcome = clean.run(tmp_path, framework, ranks, steps)
    assert outcome.status == 0, outcome.said
    assert sum(line.endswith("trained") for line in outcome.lines) == ranks
    # On a busy machine, ranks may really be slow, and log it.
    assert outcome.said == []
    assert not (tmp_path / "runs" / "latest" / "records").exists()
    # The ranks may end while the last step is measured.
    first, last = outcome.uses[1_000], outcome.uses[steps - 500]
    assert first.keys() == last.keys()
    for name in first:
        assert last[name].threads <= first[name].threads + MOST_THREADS, name
        assert last[name].files <= first[name].files + MOST_FILES, name
        assert last[name].memory <= first[name].memory + MOST_MEMORY, name
