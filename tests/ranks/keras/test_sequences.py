"""Random sequences of user actions with Keras; see sequences.py."""

from dataclasses import asdict
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.ranks.folders import shared_folder
from tests.ranks.keras.sequences import ACTIONS, Setting, run_sequence
from tests.searching import search_settings

_STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 10**6)), min_size=1, max_size=8
)
_SETTINGS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "none", "fp16", "bf16"]),
    kind=st.sampled_from(["sgd", "adam"]),
    passes=st.sampled_from([1, 1, 3]),
    step=st.sampled_from(["keras", "own"]),
    model=st.sampled_from(["plain", "plain", "norm", "mixed"]),
)
# Number of sequences without and with --long. A sequence takes some seconds, mostly for tracing.
_SHORT, _LONG = 3, 100


def sequence(hvd, setting, actions, folder):
    run_sequence(hvd, Setting(**setting), actions, Path(folder))


@pytest.mark.long_with("keras-tensorflow")
def test_sequences_of_user_actions(rank_pool, tmp_path, request):
    @search_settings(_LONG if request.config.getoption("--long") else _SHORT)
    @given(_SETTINGS, _STEPS)
    def run(setting, actions):
        rank_pool.start()
        parameters = {"setting": asdict(setting), "actions": actions, "folder": str(tmp_path)}
        rank_pool.run(__name__, "sequence", parameters)

    run()


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("setting", [{}, {"kind": "adam", "passes": 3, "compression": "fp16"}])
def test_each_action_is_always_run(hvd, setting):
    with shared_folder(hvd) as folder:
        actions = [(each, k) for k in (4, 5) for each in ACTIONS]
        run_sequence(hvd, Setting(**setting), actions, Path(folder))
