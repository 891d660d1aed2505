"""Random sequences of user actions with gradient tapes; see sequences.py."""

from dataclasses import asdict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.ranks.tensorflow.sequences import ACTIONS, Setting, run_sequence
from tests.searching import search_settings

_STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 10**6)), min_size=1, max_size=10
)
_SETTINGS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "none", "fp16", "bf16", "int8"]),
    average=st.booleans(),
    bucket_bytes=st.sampled_from([100, 10**7]),
    groups=st.sampled_from([0, 0, 2]),
    sparse_as_dense=st.booleans(),
    variables=st.sampled_from(["tensorflow", "keras"]),
    optimizer=st.sampled_from(["none", "keras"]),
    check_parameters=st.booleans(),
    on_nonfinite=st.sampled_from(["ignore", "raise"]),
    members=st.booleans(),
)
# Number of sequences without and with --long.
_SHORT, _LONG = 4, 300


def sequence(hvd, setting, actions):
    run_sequence(hvd, Setting(**setting), actions)


def test_sequences_of_user_actions(rank_pool, request):
    @search_settings(_LONG if request.config.getoption("--long") else _SHORT)
    @given(_SETTINGS, _STEPS)
    def run(setting, actions):
        rank_pool.start()
        rank_pool.run(__name__, "sequence", {"setting": asdict(setting), "actions": actions})

    run()


#: Settings with which all actions are always run.
ALWAYS = {
    "plain": {},
    "groups": {
        "compression": "fp16",
        "groups": 2,
        "variables": "keras",
        "optimizer": "keras",
        "sparse_as_dense": True,
    },
    "members": {"compression": "bf16", "bucket_bytes": 10**7, "members": True},
}


@pytest.mark.parametrize("name", ALWAYS)
def test_each_action_is_always_run(hvd, name):
    run_sequence(hvd, Setting(**ALWAYS[name]), [(each, k) for k in (4, 5) for each in ACTIONS])
