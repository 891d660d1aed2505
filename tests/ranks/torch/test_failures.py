"""Errors that end a job. Each test has new ranks."""

import sys
import time

import pytest

from hvdkit.engine.describe import installed
from hvdkit.ranks import RanksFailed
from tests.ranks.rank_pool import Configuration, start_ranks_of

BOTH = [Configuration("torch", "gloo", 3), Configuration("torch", "mpi", 3)]
# For tests in which the controllers differ little.
GLOO_FIRST = [BOTH[0], pytest.param(BOTH[1], marks=pytest.mark.long)]

SCRIPT = """
import sys, time, os, signal
import torch
import hvdkit.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(3), name="all are here")
print("started", flush=True)
"""


def run(configuration, code, timeout, failure_grace=20.0, **env):
    command = [sys.executable, "-c", SCRIPT + code]
    return start_ranks_of(configuration, command, env).wait(timeout, failure_grace)


@pytest.mark.parametrize("configuration", GLOO_FIRST, ids=str)
def test_a_rank_that_never_comes_ends_the_job(configuration):
    engine = installed()
    if configuration.controller == "gloo" and engine is not None and not engine.ours:
        # GlooController reserves global_ranks_ and never sizes it: nobody is ever found missing.
        pytest.skip("a stock Horovod does not notice stalls over Gloo")
    code = """
if hvd.rank() == 1:
    time.sleep(60)
try:
    hvd.allreduce(torch.ones(3), name="not all come")
except hvd.HorovodInternalError as error:
    print("ended:", error, flush=True)
    time.sleep(2)  # mpirun ends the other ranks as soon as one has failed
    sys.exit(1)
"""
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run(configuration, code, 50, failure_grace=1, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4")
    # Rank 1 sleeps longer.
    assert time.monotonic() - began < 45
    assert not caught.value.timed_out
    outputs = [result.output for result in caught.value.results]
    assert "ended: Horovod has been shut down" in outputs[0]
    assert "ended: Horovod has been shut down" in outputs[2]
    assert "1!: [allreduce.not all come]" in outputs[0]


@pytest.mark.parametrize("configuration", GLOO_FIRST, ids=str)
def test_a_stall_in_a_process_set_ends_the_job_of_all_ranks(configuration):
    code = """
some = hvd.add_process_set([0, 1])
if hvd.rank() == 1:
    time.sleep(60)
process_set = some if some.included() else hvd.global_process_set
for name in ("not all come", "after the end"):
    try:
        hvd.allreduce(torch.ones(3), name=name, process_set=process_set)
    except hvd.HorovodInternalError as error:
        print("ended:", error, flush=True)
time.sleep(3)
sys.exit(1)
"""
    with pytest.raises(RanksFailed) as caught:
        run(configuration, code, 50, failure_grace=1, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="4")
    assert not caught.value.timed_out
    for rank in (0, 2):
        output = caught.value.results[rank].output
        assert output.count("ended: Horovod has been shut down") == 2, output


@pytest.mark.parametrize("configuration", BOTH, ids=str)
def test_a_rank_that_dies_ends_the_job(configuration):
    code = """
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for i in range(1000):
    hvd.allreduce(torch.ones(3), name=f"{i}")
    time.sleep(0.05)
"""
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run(configuration, code, timeout=60)
    assert time.monotonic() - began < 40
    assert not caught.value.timed_out
    assert caught.value.results[1].exit_status == -9


def test_a_rank_that_ends_with_a_process_set_registered():
    code = """
hvd.add_process_set([0, 1])
if hvd.rank() == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allreduce(torch.ones(3), name="not all come")
except hvd.HorovodInternalError:
    print("ended", flush=True)
sys.exit(1)
"""
    with pytest.raises(RanksFailed) as caught:
        run(BOTH[0], code, timeout=30, failure_grace=10)
    assert not caught.value.timed_out
    for rank in (0, 2):
        assert "ended" in caught.value.results[rank].output


@pytest.mark.parametrize("configuration", BOTH[:1], ids=str)
def test_a_rank_that_starts_collectives_while_another_shuts_down(configuration):
    code = """
tensors = [torch.ones(3) for _ in range(20_000)]
for attempt in range(10):
    hvd.allreduce(torch.ones(3), name="again")
    if hvd.rank() == 0:
        time.sleep(0.002 * attempt)
    else:
        try:
            for i, tensor in enumerate(tensors):
                hvd.allreduce_async_(tensor, name=f"{attempt}.{i}")
        except (ValueError, hvd.HorovodInternalError) as error:
            assert "shut down" in str(error) or "initialized" in str(error), error
    hvd.shutdown()
    hvd.init()
"""
    run(configuration, code, 50)


@pytest.mark.long
def test_join_works_with_an_optimizer_made_before_another_init():
    """The fp16 format has a deferred collective that no step has waited for."""
    code = """
model = torch.nn.Linear(2, 1, bias=False)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), compression="fp16"
)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
hvd.shutdown()
hvd.init()
print("joined", hvd.join(), flush=True)
"""
    for result in run(BOTH[0], code, 60, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="10"):
        assert "joined" in result.output


def test_ranks_that_have_planned_different_numbers_of_optimizers():
    """Ranks of a process set have another plan; the names of the next plan are equal on all."""
    code = """
some = hvd.add_process_set([0, 1])
for process_set in (some, hvd.global_process_set):
    if process_set.included():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), process_set=process_set
        )
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
print("trained", flush=True)
"""
    for result in run(BOTH[0], code, 60, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="10"):
        assert "trained" in result.output


def test_an_exception_on_one_rank_reaches_the_others():
    code = """
if hvd.rank() == 1:
    raise ValueError("no such file")
hvd.allreduce(torch.ones(3), name="not all come")
"""
    with pytest.raises(RanksFailed) as caught:
        run(BOTH[0], code, timeout=60)
    assert sorted(caught.value.failed) == [0, 1, 2]
    assert "ValueError: no such file" in caught.value.results[1].output
    assert "Horovod has been shut down" in caught.value.results[2].output


def test_ranks_with_different_numbers_of_steps_do_not_hang():
    code = """
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3 if hvd.rank() else 5):
    optimizer.zero_grad()
    model(torch.ones(2)).backward()
    optimizer.step()
print("trained", flush=True)
"""
    with pytest.raises(RanksFailed) as caught:
        run(BOTH[0], code, timeout=60)
    assert 0 in caught.value.failed
    assert not caught.value.timed_out
    assert "trained" in caught.value.results[1].output


@pytest.mark.parametrize("configuration", GLOO_FIRST, ids=str)
def test_a_gather_while_a_rank_has_joined(configuration):
    """The gather is an error, as in Horovod, also if its response is in Horovod's cache."""
    code = """
for _ in range(3):
    hvd.allgather(torch.ones(2), name="rows")
if hvd.rank() == 0:
    hvd.join()
else:
    for _ in range(2):
        try:
            hvd.allgather(torch.ones(2), name="rows")
        except hvd.HorovodInternalError as error:
            print("refused:", error, flush=True)
    hvd.join()
hvd.allreduce(torch.ones(3), name="all are back")
"""
    results = run(configuration, code, timeout=60)
    for result in results[1:]:
        assert result.output.count("not supported with Join") == 2


@pytest.mark.parametrize("configuration", GLOO_FIRST, ids=str)
@pytest.mark.long
def test_the_last_rank_continues_alone(configuration):
    """A sum to which only the highest rank contributes, because buffers are indexed by rank."""
    code = """
for step in range(50):
    if hvd.rank() == hvd.size() - 1:
        for dtype in (torch.float32, torch.int64):
            result = hvd.allreduce(torch.ones(3, dtype=dtype), op=hvd.Sum, name=f"{step}.{dtype}")
            assert (result == 1).all(), result
    hvd.join()
print("joined", flush=True)
"""
    for result in run(configuration, code, 40):
        assert "joined" in result.output


@pytest.mark.parametrize("configuration", GLOO_FIRST, ids=str)
def test_unnamed_collectives_after_join(configuration):
    code = """
for _ in range(hvd.rank()):
    hvd.allreduce(torch.ones(3))
hvd.join()
assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == [0, 1, 2]
assert hvd.allreduce(torch.tensor([3.0 * hvd.rank()])).item() == 3.0
print("equal", flush=True)
"""
    for result in run(configuration, code, 40, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="10"):
        assert "equal" in result.output


def test_a_forked_process_ends_and_the_rank_continues():
    """The end of the fork neither waits for the engine nor closes its connections."""
    code = """
import os, sys
for how in ("end", "raise", "collective"):
    fork = os.fork()
    if not fork:
        if how == "raise":
            raise ValueError
        if how == "collective":
            hvd.allreduce(torch.ones(1))
        print("the fork ends", flush=True)
        sys.exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    assert status == (3 if how == "end" else 1), status
    assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum, name="large").eq(3).all()
print("continued", flush=True)
"""
    results = run(BOTH[0], code, 60, HVDKIT_COLLECTIVES="flat")
    for result in results:
        assert "continued" in result.output
        assert "in a process that a rank has forked after hvd.init()" in result.output
