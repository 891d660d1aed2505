import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.control import environment
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.hosts.hosts import Host


def place(local_rank=0, slots=2):
    return make_plan(["x"], "/", [Host("a", slots)], slots).places[local_rank]


WANTED = (
    "PATH PYTHONPATH VIRTUAL_ENV CONDA_PREFIX NCCL_DEBUG HOROVOD_CYCLE_TIME HVDKIT_X KERAS_BACKEND "
    "TF_CPP_MIN_LOG_LEVEL OMP_NUM_THREADS LR UCX_IB_PKEY NCCL_IB_PKEY TOKENIZERS_PARALLELISM "
    "GIT_AUTHOR_NAME"
)
UNWANTED = "HOME SSH_AUTH_SOCK DISPLAY CUDA_VISIBLE_DEVICES SLURM_PROCID TMPDIR"
SECRETS = (
    "HF_TOKEN HOROVOD_SECRET_KEY HVDKIT_PASSWORD TF_CREDENTIALS NCCL_API_KEY AUTHORIZATION "
    "PRIVATE_PKEY NCCL_SECRET"
)


def test_variables_for_ranks_on_other_hosts():
    wanted, unwanted = (dict.fromkeys(text.split(), "1") for text in (WANTED, UNWANTED))
    assert environment.forwarded(wanted | unwanted) == wanted
    assert environment.withheld(wanted | unwanted) == ["CUDA_VISIBLE_DEVICES"]
    assert "LR" not in environment.known(wanted)


@pytest.mark.parametrize("name", SECRETS.split())
def test_secrets_are_forwarded_only_on_request(name):
    env = {name: "x"}
    assert environment.forwarded(env) == {}
    assert environment.withheld(env) == [name]
    assert environment.explicit(env, [name]) == env


def test_rank_variables_of_another_job_are_not_forwarded():
    env = {"HOROVOD_RANK": "1", "HOROVOD_GLOO_IFACE": "eth0", "HVDKIT_RANK_GROUP": "abc"}
    assert environment.forwarded(env) == {}


def test_variables_by_name_and_with_values():
    assert environment.explicit({"A": "1"}, ["A", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    errors = {"A": "-x A: A is not set here", "1A=2": "'1A' is not the name", "=2": "'' is not"}
    for text, expected in errors.items():
        with pytest.raises(UsageError, match=expected):
            environment.explicit({}, [text])


def test_defaults():
    def default(name, cores, timeout):
        return environment.defaults(place(), cores, timeout)[name]

    # Ranks of a host share its cores. The timeout of Gloo is that of the launcher.
    assert [default("OMP_NUM_THREADS", cores, 60) for cores in (16, 3, 1)] == ["8", "1", "1"]
    timeouts = [default("HOROVOD_GLOO_TIMEOUT_SECONDS", 1, each) for each in (300, 5)]
    assert timeouts == ["305", "30"]


def test_a_gpu_for_each_rank():
    assert environment.pinned_gpu(place(1), None) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert environment.pinned_gpu(place(1), "4,GPU-abc") == {"CUDA_VISIBLE_DEVICES": "GPU-abc"}
    with pytest.raises(UsageError, match="a has CUDA_VISIBLE_DEVICES=4 and 2 ranks") as caught:
        environment.pinned_gpu(place(1), "4")
    assert caught.value.hosts == ["a"]


def test_hosts_with_different_numbers_of_ranks_have_no_nnodes():
    """litdata divides the number of ranks by NNODES."""
    even = make_plan(["x"], "/", [Host("a", 2), Host("b", 2)], 4)
    uneven = make_plan(["x"], "/", [Host("a", 2), Host("b", 2)], 3)
    nodes = [
        environment.torch_variables(plan, plan.places[2], "127.0.0.1", 1).get("NNODES")
        for plan in (even, uneven)
    ]
    assert nodes == ["2", None]


@pytest.mark.parametrize(
    ("env", "extra", "debug", "expected"),
    [
        ({}, [], False, 60.0),
        ({"HVDKIT_STALL_TIMEOUT": "5"}, [], False, 5.0),
        ({"HVDKIT_STALL_TIMEOUT": "5"}, ["HVDKIT_STALL_TIMEOUT=3"], False, 3.0),
        ({}, [], True, 0.0),
        ({}, ["HOROVOD_STALL_CHECK_DISABLE=0"], True, 60.0),
    ],
)
def test_the_launcher_has_the_stall_limit_of_the_ranks(env, extra, debug, expected):
    assert environment.rank_stall_seconds(env, extra, debug) == expected
