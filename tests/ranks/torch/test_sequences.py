"""Random sequences of user actions on a wrapped optimizer; see sequences.py."""

from dataclasses import asdict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.ranks.torch.sequences import ACTIONS, Setting, run_sequence
from tests.searching import search_settings

_STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 10**6)), min_size=1, max_size=15
)
_SETTINGS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "fp16", "bf16", "int8"]),
    average=st.booleans(),
    kind=st.sampled_from(["sgd", "adamw", "momentum"]),
    bucket_bytes=st.sampled_from([100, 1000, 10**7]),
    unused=st.booleans(),
)
_COMPILED = st.builds(Setting, compression=st.just("none"), compiled=st.just("aot_eager"))
_WINDOWS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "fp16", "bf16", "int8"]),
    average=st.booleans(),
    kind=st.sampled_from(["sgd", "momentum"]),
    bucket_bytes=st.sampled_from([100, 10**7]),
    window=st.sampled_from(["mean", "sum"]),
    several=st.booleans(),
)
_MEMBERS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "int8"]),
    average=st.booleans(),
    members=st.just("some"),
)
_HALVES = st.builds(
    Setting,
    compression=st.sampled_from(["none", "int8"]),
    average=st.booleans(),
    members=st.just("halves"),
)
_CLIPPED = st.builds(
    Setting,
    compression=st.sampled_from(["none", "fp16"]),
    average=st.booleans(),
    bucket_bytes=st.sampled_from([100, 10**7]),
    unused=st.booleans(),
    max_grad_norm=st.sampled_from([0.02, 1e9]),
)
_SHARDED = st.builds(
    Setting,
    compression=st.sampled_from(["none", "fp16", "bf16", "int8"]),
    average=st.booleans(),
    kind=st.sampled_from(["sgd", "adamw", "momentum"]),
    bucket_bytes=st.sampled_from([100, 10**7]),
    unused=st.booleans(),
    window=st.sampled_from(["", "mean", "sum"]),
    several=st.booleans(),
    members=st.sampled_from(["", "some"]),
    shard=st.just("optimizer"),
)
_SEVERAL = st.builds(
    Setting,
    compression=st.sampled_from(["none", "fp16"]),
    average=st.booleans(),
    kind=st.sampled_from(["sgd", "adamw", "momentum"]),
    bucket_bytes=st.sampled_from([50, 10**7]),
    unused=st.booleans(),
    several=st.just(True),
)

#: Name -> settings, and the number of sequences in the short and in the long form.
SEARCHES = {
    "plain": (_SETTINGS, 16, 1200),
    "windows": (_WINDOWS, 10, 1500),
    "members": (_MEMBERS, 5, 100),
    "halves": (_HALVES, 6, 300),
    "clipped": (_CLIPPED, 6, 300),
    "several": (_SEVERAL, 7, 1200),
    "compiled": (_COMPILED, 2, 40),
    "sharded": (_SHARDED, 10, 600),
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


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.long] * (kind in ("halves", "clipped")))
        for kind in SEARCHES
    ],
)
def test_sequences_of_user_actions(rank_pool, kind, request):
    strategy, short, long = SEARCHES[kind]
    search(rank_pool, strategy, long if request.config.getoption("--long") else short)


_GAPS = [("window_passes_of_some_ranks", number) for number in (5, 11, 17, 23)]
_OTHER_MEMORY = [
    ("plain_step", 1),
    ("double_and_back", 1),
    ("backward", 2),
    ("step", 0),
    ("zero_grad_in_place", 0),
    ("other_memory_for_gradients", 2),
    ("plain_step", 3),
    ("double_and_back", 0),
    ("plain_step", 4),
]
_SWAPS = [
    (swap, number) for number in (69, 1, 5, 0) for swap in ("swap_on_conversion", "swap_tensors")
]
_CLIPPED_TOGETHER = [("two_losses", 1), ("clip_with_hvd", 0), ("step", 0)] * 2
_CLIPPED_ROW = [
    (name, number)
    for number in (2, 4)
    for name in (
        *("plain_step", "two_losses", "double_and_back", "backward", "step", "zero_grad_in_place"),
        *("accumulate_without_sync", "idle_rank", "accumulate_and_step", "idle_rank_at_step"),
    )
]

#: Sequences that are always run: name -> a list of settings, and the actions.
ROWS = {
    "a parameter is added after one rank has loaded a state": (
        [{"kind": "momentum"}],
        [("load_on_one_rank", 0), ("add_parameters", 0), ("flush", 0)],
    ),
    "a window of one pass, of two, and whole ones": (
        [{"window": "mean"}, {"window": "mean", "compression": "fp16"}],
        [("window_passes", 0), ("flush", 0), ("window_passes", 1), ("flush", 0)] * 2
        + [("window_passes", 5)],
    ),
    "sums over ranks or passes": (
        [{"window": "mean", "average": False}, {"window": "sum", "average": False}],
        [("window_passes", 5)],
    ),
    "torch.autograd.grad in a whole window": (
        [{"window": "mean"}, {"window": "sum"}],
        [("grad_in_full_window", number) for number in range(4)],
    ),
    "batches without a pass": ([{"window": "mean"}, {"window": "sum"}], _GAPS),
    "passes that reach other optimizers": (
        [{"window": "mean", "several": True}, {"window": "sum", "several": True}],
        [("window_passes", 5), ("window_passes", 11)],
    ),
    "other memory on one rank": (
        [{"compression": wire} for wire in ("none", "fp16", "bf16")],
        _OTHER_MEMORY,
    ),
    "passes after swaps of parameters": (
        [{}, {"compression": "int8", "average": False, "members": "some"}, {"average": False}],
        _SWAPS,
    ),
    "a new parameter that one rank freezes": (
        [{}, {"average": False}],
        [("new_parameters", 0), ("freeze_on_one_rank", 0), ("plain_step", 1)],
    ),
    "closures that clip sums": ([{"average": False}], [("closure", number) for number in range(4)]),
    "gradients that are clipped by a norm": (
        [{"max_grad_norm": 0.02}, {"max_grad_norm": 1e9}, {"max_grad_norm": 0.02, "unused": True}],
        _CLIPPED_ROW,
    ),
    "gradients that the script writes": (
        [{}, {"average": False}],
        [("write_before_a_pass", number) for number in range(4)],
    ),
    "passes of some ranks after a dropped pass": (
        [{"window": "mean"}],
        [(name, k) for k in (5, 4) for name in ("dropped_pass_in_window", _GAPS[0][0])],
    ),
    "optimizers that alternate": (
        [{"several": True, "window": "mean"}],
        [("alternating_optimizers", number) for number in (0, 1)],
    ),
    "one norm of several optimizers": (
        [{"several": True}, {"several": True, "average": False, "unused": True}],
        _CLIPPED_TOGETHER,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_sequences_that_are_always_run(hvd, name):
    settings, actions = ROWS[name]
    for setting in settings:
        run_sequence(hvd, Setting(**setting), actions)
