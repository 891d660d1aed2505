"""HVDKIT_SHARE_GPUS. Only `scripts/check_gpu` runs NCCL."""

import pytest

from hvdkit.runtime.shared_gpus import gpu_of, separate_for_nccl

SHARED = {"HVDKIT_SHARE_GPUS": "1"}


@pytest.mark.parametrize(
    ("local_rank", "count", "environ", "number"),
    [(1, 2, {}, 1), (1, 1, {}, None), (0, 0, SHARED, None), (3, 2, SHARED, 1), (0, 2, SHARED, 0)],
)
def test_the_gpu_of_a_rank(local_rank, count, environ, number):
    assert gpu_of(local_rank, count, environ) == number


def test_each_process_is_a_host_for_nccl_only_on_request():
    environ = {"NCCL_HOSTID": "node7"}
    separate_for_nccl(environ)
    assert environ == {"NCCL_HOSTID": "node7"}
    environ |= SHARED
    separate_for_nccl(environ)
    assert environ["NCCL_HOSTID"] != "node7"
    assert environ["NCCL_NET"] == "Socket"
    # The site may have a network of its own.
    environ = {**SHARED, "NCCL_NET": "IB"}
    separate_for_nccl(environ)
    assert environ["NCCL_NET"] == "IB"
