"""Positions of checkpointers in the commits of elastic jobs."""

import gc

import pytest

from hvdkit.checkpoint import replaced_state


class Counter:
    def __init__(self, steps):
        self.steps = steps

    def position(self):
        return {"steps": self.steps}


@pytest.fixture(autouse=True)
def no_positions(monkeypatch):
    monkeypatch.setattr(replaced_state, "_restored", {})
    monkeypatch.setattr(replaced_state, "_ended", {})
    monkeypatch.setattr(replaced_state, "_positioned", type(replaced_state._positioned)())


def test_a_commit_restores_the_positions():
    running, ended = Counter(3), Counter(8)
    replaced_state.keep_position("running", running)
    replaced_state.keep_position("ended", ended)
    replaced_state.end_position("ended")
    assert replaced_state.take_position("ended") is None  # no commit was restored
    ended.steps, running.steps = 0, 4
    committed = replaced_state.positions()
    replaced_state.restore_positions({"of an older commit": 1})
    replaced_state.restore_positions(committed)
    assert replaced_state.take_position("of an older commit") is None
    assert replaced_state.take_position("ended") == {"steps": 8}
    assert replaced_state.take_position("running") == {"steps": 4}
    # A second `fit` of the process continues with the state in memory.
    assert replaced_state.take_position("running") is None


def test_an_object_that_was_deleted_has_no_position():
    counter = Counter(1)
    replaced_state.keep_position("counter", counter)
    del counter
    gc.collect()
    assert replaced_state.positions() == {}
