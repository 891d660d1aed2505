"""Random sequences of user actions on a wrapped optimizer; see sequences.py."""

from dataclasses import asdict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.parallel.torch.sequences import ACTIONS, Setting, run_sequence
from tests.searching import search_settings

_STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 10**6)), min_size=1, max_size=15
)
_SETTINGS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "fp16", "bf16", "int8"]),
    average=st.booleans(),
    kind=st.sampled_from(["sgd", "adamw"]),
    bucket_bytes=st.sampled_from([100, 1000, 10**7]),
    unused=st.booleans(),
)
_COMPILED = st.builds(Setting, compression=st.just("none"), compiled=st.just("aot_eager"))
_WINDOWS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "fp16", "bf16", "int8"]),
    average=st.booleans(),
    bucket_bytes=st.sampled_from([100, 10**7]),
    window=st.sampled_from(["mean", "sum"]),
    several=st.booleans(),
)
_MEMBERS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "int8"]),
    average=st.booleans(),
    members=st.just(True),
)
_SEVERAL = st.builds(
    Setting,
    compression=st.sampled_from(["none", "fp16"]),
    average=st.booleans(),
    kind=st.sampled_from(["sgd", "adamw"]),
    bucket_bytes=st.sampled_from([50, 10**7]),
    unused=st.booleans(),
    several=st.just(True),
)

#: Name -> settings, and the number of sequences in the short and in the long form.
SEARCHES = {
    "plain": (_SETTINGS, 20, 1200),
    "windows": (_WINDOWS, 15, 1500),
    "members": (_MEMBERS, 8, 100),
    "several": (_SEVERAL, 10, 1200),
    "compiled": (_COMPILED, 2, 40),
}


def sequence(hvd, setting, actions):
    run_sequence(hvd, Setting(**setting), actions)


def search(pool, strategy, examples):
    """Draw settings and sequences, and run each on the ranks; a failure shows the shortest one."""

    @search_settings(examples)
    @given(strategy, _STEPS)
    def run(setting, actions):
        pool.start()
        pool.run(__name__, "sequence", {"setting": asdict(setting), "actions": actions})

    run()


@pytest.mark.parametrize("kind", SEARCHES)
def test_sequences_of_user_actions(rank_pool, kind, request):
    strategy, short, long = SEARCHES[kind]
    search(rank_pool, strategy, long if request.config.getoption("--long") else short)
