"""Whether a save must wait for the step that uses reduced gradients."""

import pytest


def make():
    """Return an `AwaitedStep`, and the list of its warnings."""
    from hvdkit.torch.awaited_step import AwaitedStep

    texts = []
    return AwaitedStep(texts.append), texts


def exist():
    return True


def test_a_save_waits_between_the_reduction_and_the_step(hvd):
    awaited, texts = make()
    assert not awaited.is_awaited(exist)
    for _ in range(20):
        awaited.begin()
        assert awaited.is_awaited(exist)
        awaited.step()
        assert not awaited.is_awaited(exist)
    assert texts == []


def test_gradients_that_the_script_always_removes(hvd):
    """Only the first saves are postponed."""
    awaited, texts = make()
    answers = []
    for _ in range(5):
        awaited.begin()
        awaited.step()
        awaited.begin()  # a pass that no step uses
        answers.append(awaited.is_awaited(exist))
        awaited.remove()
    assert answers == [True, True, True, False, False]
    assert texts == []


@pytest.mark.parametrize("asks", ["always", "rarely"])
def test_gradients_that_are_left_over_after_the_step_of_another_optimizer(hvd, asks):
    awaited, texts = make()
    answers = []
    for step in range(5):
        awaited.begin()
        awaited.step()
        awaited.begin()
        awaited.note_other_step()
        if asks == "always" or step == 4:
            answers.append(awaited.is_awaited(exist))
        awaited.remove()
    assert answers == ([True, True, True, False, False] if asks == "always" else [False])
    assert texts == []


def test_passes_that_the_script_accumulates(hvd):
    """Another optimizer makes a step in each pass. A save must not lose the passes."""
    awaited, texts = make()
    for _ in range(3):
        for _ in range(16):
            awaited.begin()
            awaited.note_other_step()
            assert awaited.is_awaited(exist)
        awaited.step()
        assert not awaited.is_awaited(exist)
    assert texts == []


def test_an_incomplete_window_at_the_end_of_each_epoch(hvd):
    """The script removes its gradients, but uses those of the next window."""
    awaited, texts = make()
    for _ in range(5):
        for batch in range(10):
            awaited.begin()
            if batch % 4 == 3:
                awaited.step()
            assert awaited.is_awaited(exist) == (batch % 4 != 3)
        awaited.remove()
    assert texts == []


def test_an_optimizer_that_makes_no_steps(hvd):
    awaited, texts = make()
    answers = []
    for _ in range(40):
        awaited.begin()
        awaited.note_other_step()
        answers.append(awaited.is_awaited(exist))
    assert answers == [True] * 31 + [False] * 9
    assert texts == []


def test_a_warning_if_the_script_never_asks_after_the_step(hvd):
    awaited, texts = make()
    for _ in range(20):
        awaited.begin()
        assert awaited.is_awaited(exist)
        awaited.step()
    assert len(texts) == 1
    assert "in each of the last 8 steps" in texts[0]


def test_a_warning_if_a_step_uses_gradients_although_a_save_was_permitted(hvd):
    awaited, texts = make()
    for ends in (awaited.remove, awaited.remove, awaited.remove, awaited.step, awaited.step):
        awaited.begin()
        awaited.is_awaited(exist)
        ends()
    assert len(texts) == 1
    assert "lacks this step" in texts[0]
