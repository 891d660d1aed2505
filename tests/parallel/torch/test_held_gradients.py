"""`p.grad` belongs to whoever holds it; see held_gradients.py."""

from dataclasses import asdict

import hypothesis.strategies as st
from hypothesis import given

from tests.parallel.torch.held_gradients import ACTIONS, OPTIMIZERS, Setting, run_sequence
from tests.searching import search_settings

_STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 10**6)), min_size=1, max_size=15
)
_SETTINGS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "none", "fp16", "bf16", "int8"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    bucket_bytes=st.sampled_from([2000, 10**6]),
    passes=st.sampled_from([1, 1, 3]),
    counts=st.sampled_from([True, True, True, False]),
    mixed=st.booleans(),
)


def sequence(hvd, setting, actions):
    run_sequence(hvd, Setting(**setting), actions)


def test_sequences(rank_pool, request):
    @search_settings(1500 if request.config.getoption("--long") else 15)
    @given(_SETTINGS, _STEPS)
    def run(setting, actions):
        rank_pool.start()
        rank_pool.run(__name__, "sequence", {"setting": asdict(setting), "actions": actions})

    run()
