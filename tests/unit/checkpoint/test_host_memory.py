"""Steps in the memory of hosts, on simulated ranks and real folders."""

import errno
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hvdkit.checkpoint import chunks, host_memory
from hvdkit.checkpoint.items import kept_in
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.sharding import Shard, ShardedItem
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from hvdkit.runtime import progress, record_files
from tests.unit.checkpoint.simulated_state import ArrayTensor, Own
from tests.unit.checkpoint.test_manager import Arrays, failing, on_ranks, same, state

#: The hosts of the ranks.
HOSTS = ("a", "a", "b")


class World:
    """Ranks on hosts with folders for steps, and a folder on disk."""

    def __init__(self, folder, monkeypatch):
        self.disk = folder / "disk"
        self.of_ranks = threading.local()
        self.folders = {
            host: [folder / f"{place}-{host}" for place in ("memory", "temporary")]
            for host in {*HOSTS, "c"}
        }
        for each in (path for paths in self.folders.values() for path in paths):
            each.mkdir()
        monkeypatch.setattr(host_memory.host_folders, "folders", lambda: self.of_ranks.folders)

    def run(self, train, hosts=HOSTS, **how):
        """Call `train(manager, part, own)` on the ranks of a start of the job."""

        def on_rank(collectives):
            host = hosts[collectives.rank]
            self.of_ranks.folders = self.folders[host] if host else []
            part, own = state(0), Own(None)
            own.metadata = {}
            options = {"every_steps_in_memory": 1} | how
            with Manager(
                Store(str(self.disk), keep_last=None),
                collectives,
                {"model": part, "metadata": kept_in(own.metadata)},
                rank_parts={"own": own},
                **options,
            ) as manager:
                return train(manager, part, own, collectives.rank)

        return on_ranks(on_rank, len(hosts))

    def train(self, begin, end, disk_every=None, hosts=HOSTS):
        """Restore `begin`, and train to the step `end`. Its state is this number."""

        def train(manager, part, own, rank):
            restored = manager.restore()
            assert (restored.step if restored else 0) == begin
            assert same(part, begin)
            if restored and restored.world_size == len(hosts):
                assert own.value == [rank, begin]
            for step in range(begin + 1, end + 1):
                part.value = step
                part.arrays["weights"][:] = step
                part.arrays["steps"][...] = step
                own.value = [rank, step]
                assert manager.maybe_save(step) == bool(disk_every and step % disk_every == 0)
                idle(manager)

        self.run(train, hosts, every_steps=disk_every)

    def steps(self, host, place=0):
        """Return the steps in a folder of a host."""
        return sorted(
            (info.manifest.run, info.step)
            for folder in self.folders[host][place].glob("steps-*")
            if folder.is_dir()
            for info in Store(folder).steps()
        )

    def lose(self, host):
        for folder in self.folders[host]:
            shutil.rmtree(folder)
            folder.mkdir()

    def damage(self, host):
        (file,) = self.folders[host][0].glob("steps-*/step-*/model.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def idle(manager):
    """Wait for the write of this rank, so that the next step is kept."""
    for each in manager._host_memory._steps or ():
        each.wait()


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def test_each_host_keeps_the_newest_step(world):
    world.train(0, 5, disk_every=3)
    for host in ("a", "b"):
        assert world.steps(host) == [(1, 5)]
    assert [info.step for info in Store(world.disk).steps()] == [3]
    world.train(5, 6)
    assert world.steps("a") == world.steps("b") == [(1, 6)]
    # The disk has a newer step than the memory.
    world.train(6, 9, disk_every=9)
    world.train(9, 9)


def test_before_the_first_step_on_disk(world):
    world.train(0, 2)
    world.train(2, 4, disk_every=4)
    assert [(info.manifest.run, info.step) for info in Store(world.disk).steps()] == [(1, 4)]


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_lost_host_gets_the_step_of_another_host(world, lost):
    world.train(0, 5, disk_every=3)
    world.lose(lost)
    world.train(5, 5)
    # A restore copies to the host of the first rank only.
    assert (world.steps(lost) == [(1, 5)]) == (lost == "a")
    world.train(5, 7)
    assert world.steps("a") == world.steps("b") == [(1, 7)]


def test_each_host_keeps_the_metadata_of_the_first_rank(world):
    def train(manager, part, own, rank):
        own.metadata |= {"history": [rank], "best": np.full(2, rank)}
        manager.maybe_save(1)

    world.run(train)
    world.lose("a")

    def check(manager, part, own, rank):
        assert manager.restore().step == 1
        return own.metadata["history"], own.metadata["best"].tolist()

    assert world.run(check) == [([0], [0, 0])] * 3


def test_without_any_step_in_memory_the_disk_counts(world):
    world.train(0, 5, disk_every=3)
    world.lose("a")
    world.lose("b")
    world.train(3, 4)


def test_damaged_steps(world, caplog):
    world.train(0, 5, disk_every=3)
    world.damage("a")
    world.train(5, 5)
    world.damage("a")
    world.damage("b")
    world.train(3, 5)
    assert world.steps("a") == world.steps("b") == [(1, 5)]
    assert "model.safetensors: its content is not what was written" in caplog.text


@pytest.fixture
def many_chunks(monkeypatch):
    """A tensor has many chunks. When a step is opened, only the first ones are read."""

    def larger(value):
        return Arrays(
            value,
            weights=np.full((100_000, 3), value, np.float32),
            steps=np.full((), value, np.int64),
        )

    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64_000)
    monkeypatch.setitem(globals(), "state", larger)


@pytest.mark.usefixtures("many_chunks")
def test_a_damaged_tensor_of_the_first_host_is_not_needed(world):
    world.train(0, 5, disk_every=3)
    world.damage("a")
    world.train(5, 6)
    assert world.steps("a") == world.steps("b") == [(1, 6)]


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_tensor_of_the_only_host(world, strict):
    world.train(0, 5, disk_every=3, hosts=("a", "a"))
    world.damage("a")

    def check(manager, part, own, rank):
        return manager.restore(strict=strict).step, same(part, 3), own.value

    assert world.run(check, ("a", "a")) == [(3, True, [0, 3]), (3, True, [1, 3])]


@pytest.mark.parametrize("hosts", [("a",), ("c", "b"), ("a", "a", "b", "b", "c")])
def test_another_number_of_ranks(world, hosts):
    world.train(0, 5)
    world.train(5, 7, hosts=hosts)
    assert world.steps(hosts[-1]) == [(1, 7)]


def test_a_host_that_joins_again_has_an_older_step(world):
    world.train(0, 5)
    world.train(5, 7, hosts=("b", "c"))
    world.train(7, 7)
    world.train(7, 8)
    assert world.steps("a") == world.steps("b") == [(1, 8)]


def test_a_rollback_begins_a_run(world):
    world.train(0, 5, disk_every=3)

    def roll_back(manager, part, own, rank):
        assert manager.restore(3).step == 3
        manager.maybe_save(4)
        idle(manager)

    # Another training saves step 9 into the folder, so that step 3 is not the newest.
    world.train(5, 9, disk_every=9)
    world.run(roll_back)
    assert world.steps("a") == world.steps("b") == [(2, 4)]

    def check(manager, part, own, rank):
        return manager.restore().step

    assert world.run(check) == [4] * 3
    # `step` and `only` are for the disk.
    assert world.run(lambda manager, *_: manager.restore(only=("model",)).step) == [3] * 3


def test_the_run_of_a_step_in_memory_continues_on_disk(world):
    """A new run of the folder begins with its first step on disk, after the steps in memory."""
    world.train(0, 3, disk_every=3)

    def begin(manager, part, own, rank):
        for step in (1, 2):
            manager.maybe_save(step)
            idle(manager)

    world.run(begin, overwrite=True)
    assert world.steps("b") == [(2, 2)]

    def go_on(manager, part, own, rank):
        assert manager.restore().step == 2
        manager.save(4, wait=True)
        return manager.run

    assert world.run(go_on)[0] == 2
    assert Store(world.disk).steps()[-1].manifest.run == 2


def test_a_full_memory(world, monkeypatch, caplog):
    free = {"memory": 10_000_000, "temporary": 10_000_000}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path.name.partition("-")[0]])
    )
    world.train(0, 2)
    assert world.steps("a") == [(1, 2)]
    free["memory"] = 100
    world.train(2, 4)
    assert world.steps("a", 1) == [(1, 4)]
    assert world.steps("a") == []
    assert caplog.text.count("temporary-a, because") == 1
    free["temporary"] = 100
    world.train(4, 8)
    assert caplog.text.count("expected twice as much free space in") == 2
    world.train(4, 4)


def test_a_write_that_fails_leaves_the_step_before(world, monkeypatch, caplog):
    world.train(0, 3)
    monkeypatch.setattr(disk, "before_step", failing("write", errno.ENOSPC))
    world.train(3, 5)
    # Once on each of two hosts.
    assert caplog.text.count(os.strerror(errno.ENOSPC)) == 2
    monkeypatch.setattr(disk, "before_step", None)
    world.train(3, 4)


def test_a_step_is_skipped_while_a_host_writes(world, monkeypatch):
    """The ranks do not wait, and all of them skip the same steps."""
    held = threading.Event()

    def before(step, name):
        if step == "fsync" and name == "manifest.json" and "b" in threading.current_thread().name:
            held.wait(60)

    def train(manager, part, own, rank):
        for step in (1, 2, 3):
            manager.maybe_save(step)
            if HOSTS[rank] == "a":
                idle(manager)
            elif step == 1:
                held.wait(0.1)
            if step == 2:
                assert world.steps("a") == [(1, 1)]
        held.set()
        idle(manager)
        manager.maybe_save(4)
        idle(manager)

    started = threading.Thread.start

    def name_thread(thread):
        folders = getattr(world.of_ranks, "folders", [])
        if thread.name == "hvdkit-checkpoint" and folders == world.folders["b"]:
            thread.name += " of b"
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", name_thread)
    monkeypatch.setattr(disk, "before_step", before)
    world.run(train)
    assert world.steps("a") == world.steps("b") == [(1, 4)]


def test_a_rank_without_folders(world, caplog):
    """Then no rank keeps steps."""
    world.train(0, 5, disk_every=3, hosts=("a", "a", None))
    assert world.steps("a") == []
    assert "no effect" not in caplog.text
    world.train(3, 5, disk_every=3, hosts=(None, "a"))
    assert caplog.text.count("every_steps_in_memory has no effect") == 1


def test_a_step_in_memory_is_progress_once_it_was_restored(world, tmp_path, monkeypatch):
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))
    saved = tmp_path / record_files.SAVED

    def is_progress(*arguments, **how):
        saved.unlink(missing_ok=True)
        world.train(*arguments, **how)
        return saved.exists()

    assert not is_progress(0, 3)
    assert is_progress(3, 3)
    # The job fails at the same place again and again.
    assert not is_progress(3, 3)
    assert not is_progress(3, 4)
    assert is_progress(4, 5)
    # Its hosts are lost each time.
    assert is_progress(5, 6, disk_every=6)
    for _ in range(2):
        world.lose("a")
        world.lose("b")
        assert not is_progress(6, 9)


def test_every_steps_in_memory(world):
    def train(manager, part, own, rank):
        kept = []
        for step in range(1, 8):
            manager.maybe_save(step)
            idle(manager)
            kept.append([number for _, number in world.steps("a")])
        return kept

    steps = world.run(train, ("a",), every_steps_in_memory=3)[0]
    assert steps == [[], [], [3], [3], [3], [6], [6]]


def test_errors(world, tmp_path):
    for every in (0, 1.5):
        with pytest.raises(UsageError, match=f"every_steps_in_memory is {every}: expected a whole"):
            world.run(lambda *_: None, ("a",), every_steps_in_memory=every)
    rows = np.zeros((2, 2), np.float32)
    shards = ShardedItem({"table": Shard(rows, 0, 2)}, lambda t, _: ArrayTensor(t), id)

    def make(collectives):
        world.of_ranks.folders = []
        Manager(Store(str(tmp_path / "d")), collectives, {"t": shards}, every_steps_in_memory=1)

    with pytest.raises(UsageError, match="tensors are divided among the ranks"):
        on_ranks(make, 1)

    def fails(manager, part, own, rank):
        if rank == 1:
            own.save = lambda: object()
        manager.maybe_save(1)

    with pytest.raises(UsageError, match=r"rank 1: .*step 1 was not kept in memory"):
        world.run(fails)


def test_a_rank_that_ends_logs_no_failure(world, caplog):
    def train(manager, part, own, rank):
        for step in range(1, 50):
            manager.maybe_save(step)

    world.run(train)
    assert "not kept" not in caplog.text
    assert world.steps("a")
