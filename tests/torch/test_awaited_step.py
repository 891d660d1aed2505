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


def test_questions_in_a_row_count_again_after_one_without_gradients(hvd):
    awaited, texts = make()
    awaited.begin()
    for k in range(14):
        assert awaited.is_awaited(exist)
        if k == 6:
            assert not awaited.is_awaited(lambda: False)
    assert [awaited.is_awaited(exist) for _ in range(3)] == [False] * 3
    assert len(texts) == 1


@pytest.mark.parametrize(("reduced_again", "warns"), [(False, True), (True, False)])
def test_a_question_between_the_steps_of_two_optimizers(hvd, reduced_again, warns):
    awaited, texts = make()
    awaited.begin()
    awaited.note_other_step()
    assert not awaited.is_awaited(exist)
    if reduced_again:
        awaited.begin()
    awaited.step()
    assert bool(texts) == warns
