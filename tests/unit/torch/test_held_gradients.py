"""`p.grad` belongs to whoever holds it, also with one rank; see tests/ranks/torch."""

import random

import pytest

from tests.ranks.torch.held_gradients import ACTIONS, OPTIMIZERS, Setting, run_sequence


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sequences(hvd, optimizer, passes):
    for seed in range(10):
        draw = random.Random(seed)
        actions = [(draw.choice(sorted(ACTIONS)), draw.randrange(10**6)) for _ in range(15)]
        run_sequence(hvd, Setting(optimizer=optimizer, passes=passes), actions)
