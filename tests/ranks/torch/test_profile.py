"""`hvd.profile` on real ranks: one trace, whose clocks are right."""

import contextlib
import json
import time
from collections import defaultdict

import pytest
import torch

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.profiling import clocks, trace_file
from tests.ranks.folders import shared_folder
from tests.ranks.torch.oracle import batch_of, loss_of, sgd, small_model, wrapped
from tests.ranks.traces import check

#: Nanoseconds by which the clock of rank 1 is wrong in some tests.
SHIFT = 3_000_000_000


def train(hvd, profile, steps, **options):
    """Train in a profile's context, in small buckets; rank 2 is slow."""
    model = small_model(torch.float32)
    optimizer = wrapped(hvd, model, bucket_bytes=200, **options)
    hvd.broadcast_parameters(model.state_dict(), 0)
    with profile:
        for step in profile.batches(range(steps)):
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step, torch.float32)).backward()
            if hvd.rank() == 2:
                time.sleep(0.02)
            optimizer.step()
    return profile


def torch_operations(trace):
    """Return the number of matrix products of each rank."""
    counts = defaultdict(int)
    for event in trace["traceEvents"]:
        counts[event["pid"] // 1000] += event["name"] == "aten::addmm"
    return dict(counts)


def test_one_trace_of_all_ranks(hvd):
    with shared_folder(hvd) as folder:
        path = folder / "new" / "trace.json.gz"
        profile = train(hvd, hvd.profile(path, steps=2, wait=1), 5)
        assert f"wrote 2 steps of {hvd.size()} ranks to {path}" in profile.summary
        assert "All ranks have the same clock." in profile.summary
        assert [file.name for file in path.parent.iterdir()] == ["trace.json.gz"]
        trace = trace_file.read(path)
        assert check(hvd, trace, [2, 3]) == 0
        # Three linear layers in two steps.
        assert torch_operations(trace) == dict.fromkeys(range(hvd.size()), 6)
        times = [event["ts"] for event in trace["traceEvents"] if "ts" in event]
        assert min(times) >= 0
        data = trace["otherData"]
        assert [each["rank"] for each in data["ranks"]] == list(range(hvd.size()))
        assert data["collectives_compared"] >= 8
        assert data["collectives_that_contradict_the_clocks"] == 0


@contextlib.contextmanager
def clock_ahead(hvd, rank):
    """Context in which the clock of a rank is ahead: for steps, collectives and PyTorch."""
    from hvdkit.torch import runtime

    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == rank:
            read = runtime.recorder.read

            def shifted(*args):
                record = json.loads(read(*args))
                for call in record["done"]:
                    call["enqueued"] += SHIFT / 1e9
                    call["ended"] += SHIFT / 1e9
                return json.dumps(record)

            patch.setattr(runtime.recorder, "read", shifted)
            patch.setattr(clocks, "now", lambda: time.monotonic_ns() + SHIFT)
        yield


def test_a_clock_that_is_wrong(hvd):
    with shared_folder(hvd) as folder, clock_ahead(hvd, rank=1):
        profile = train(hvd, hvd.profile(folder / "trace", steps=2, wait=1), 3)
        trace = trace_file.read(folder / "trace")
        error = check(hvd, trace, [2, 3])
        assert 0 < error < SHIFT / 1e3 / 10
        offset = trace["otherData"]["ranks"][1]["clock"]["offset_us"]
        assert abs(offset - SHIFT / 1e3) <= error
        assert "The clocks of the ranks are aligned to" in profile.summary
        # PyTorch's operations are moved, too.
        of_rank = defaultdict(list)
        for event in trace["traceEvents"]:
            if event["name"] == "aten::addmm":
                of_rank[event["pid"] // 1000].append(event["ts"])
        assert abs(min(of_rank[0]) - min(of_rank[1])) < SHIFT / 1e3 / 2


@pytest.mark.long
def test_a_clock_that_is_set_while_it_is_measured(hvd):
    """Without the correction, the profile says so; and the checks of these tests find it."""
    exact = clocks.Offset(0.0, 0.0, 0.0)
    with (
        shared_folder(hvd) as folder,
        clock_ahead(hvd, rank=1),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(clocks, "offset_of", lambda *_: exact)
        profile = train(hvd, hvd.profile(folder / "trace", steps=2, wait=1), 3)
        assert "do not overlap on all ranks, so a clock was set" in profile.summary
        with pytest.raises(AssertionError):
            check(hvd, trace_file.read(folder / "trace"), [2, 3])
        hvd.barrier()


@pytest.mark.long
def test_a_loop_that_ends_early(hvd):
    with shared_folder(hvd) as folder:
        path = folder / "trace.json.gz"
        train(hvd, hvd.profile(path, steps=9, wait=1), 3)
        check(hvd, trace_file.read(path), [2, 3])
        assert not train(hvd, hvd.profile(folder / "none", steps=1, wait=5), 3).summary
        hvd.barrier()
        assert not (folder / "none").exists()


@pytest.mark.long
def test_collectives_that_end_after_the_last_step(hvd):
    """With fp16, no step waits for the exchange of scales at its end."""
    for _ in range(3):
        with shared_folder(hvd) as folder:
            path = folder / "trace.json.gz"
            train(hvd, hvd.profile(path, steps=4, wait=2), 6, compression="fp16")
            data = trace_file.read(path)["otherData"]
            assert data["collectives_compared"] >= 16
            assert data["collectives_that_contradict_the_clocks"] == 0
            hvd.barrier()


def test_an_exception_in_the_loop(hvd):
    """No rank waits for the others, and the next profile works."""
    with shared_folder(hvd) as folder:
        path = folder / "trace.json.gz"
        profile = hvd.profile(path, steps=2, wait=0)
        with pytest.raises(RuntimeError, match="of the script"), profile:  # noqa: PT012
            profile.step()
            raise RuntimeError("of the script")
        profile.step()
        hvd.barrier()
        assert not path.exists()
        train(hvd, hvd.profile(path, steps=1, wait=1), 2)
        check(hvd, trace_file.read(path), [2])


def test_a_file_that_cannot_be_written(hvd):
    with (
        pytest.raises(UsageError, match="cannot write /dev/null/trace: /dev/null is not a folder"),
        hvd.profile("/dev/null/trace"),
    ):
        pass
    with (
        shared_folder(hvd) as folder,
        pytest.raises(UsageError, match="is a folder: expected the name of a file"),
        hvd.profile(folder),
    ):
        pass


def test_a_disk_that_is_full(hvd):
    def full(*_):
        raise OSError(28, "No space left on device")

    with shared_folder(hvd) as folder, pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 0:
            patch.setattr(trace_file.gzip, "open", full)
        with pytest.raises(HvdkitError, match="no trace was written: .*: No space left on device"):
            train(hvd, hvd.profile(folder / "trace", steps=1, wait=0), 1)
        hvd.barrier()
        assert not list(folder.iterdir())


def test_a_profiler_that_does_not_start(hvd):
    """Another profiler runs on rank 1 only. It continues."""
    with shared_folder(hvd) as folder:
        other = torch.profiler.profile() if hvd.rank() == 1 else contextlib.nullcontext()
        with other:
            expected = r"rank 1: the profiler could not start: another profiler of PyTorch"
            with (
                pytest.raises(HvdkitError, match=expected),
                hvd.profile(folder / "trace", steps=1, wait=0),
            ):
                pass
        if hvd.rank() == 1:
            assert len(other.events()) > 0


def test_a_profile_within_a_profile(hvd):
    """The inner one is refused, and the outer one is complete."""
    with shared_folder(hvd) as folder:
        with hvd.profile(folder / "outer.gz", steps=2, wait=0) as outer:
            for _ in range(2):
                with (
                    pytest.raises(HvdkitError, match=r"or another hvd\.profile, is recording"),
                    hvd.profile(folder / "inner.gz", steps=1, wait=0),
                ):
                    pass
                outer.step()
        assert "wrote 2 steps" in outer.summary
        assert not (folder / "inner.gz").exists()


def test_nvtx_ranges(hvd):
    """Simulated, without a GPU: each step is one range."""
    from hvdkit.torch.profiling import Profiler

    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda.nvtx, "range_push", calls.append)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
        profiler = Profiler({})
        for number in (4, 5):
            profiler.step_begins(number)
            profiler.step_ends()
    assert calls == ["step 4", "end", "step 5", "end"]


def test_invalid_arguments(hvd):
    for name, value in [("steps", 0), ("steps", 2.5), ("wait", -1), ("steps", True)]:
        with pytest.raises(UsageError, match=f"{name} is {value}: expected a whole number >="):
            hvd.profile(**{name: value})
    with pytest.raises(UsageError, match="without a context"):
        hvd.profile().step()
    with hvd.profile("trace") as profile:
        pass
    with pytest.raises(UsageError, match="was used before: call hvd.profile again"), profile:
        pass
    with pytest.raises(UsageError, match="path is ''"):
        hvd.profile("")
    with pytest.raises(UsageError, match="has no schedule: pass steps and wait"):
        hvd.profile(schedule=None)
    with pytest.raises(UsageError, match="unexpected keyword argument 'stack'"):
        hvd.profile(stack=True)
    with (
        pytest.raises(RankMismatchError, match="rank 0: steps: 4"),
        hvd.profile("trace", steps=4 + hvd.rank()),
    ):
        pass


def test_join_in_the_recorded_steps(hvd):
    """A rank in `join` takes part in sums only, so no trace is written, and no rank hangs."""
    model = small_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with shared_folder(hvd) as folder:
        with hvd.profile(folder / "trace", steps=4, wait=0) as profile:
            for step in profile.batches(range(2 if hvd.rank() == 0 else 5)):
                optimizer.zero_grad()
                loss_of(model, batch_of(hvd.rank(), step, torch.float32)).backward()
                optimizer.step()
            hvd.join()
        assert not profile.summary
        hvd.barrier()
        assert not list(folder.iterdir())
