"""Commits of elastic states on hosts: folders of their own, and ranks in threads."""

import errno
import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.host_steps import HostSteps, key_of
from hvdkit.checkpoint.items import Plain
from hvdkit.checkpoint.snapshot import SnapshotMemory, encoded
from hvdkit.checkpoint.step_boundary import StepBoundary
from hvdkit.elastic import parts, run
from hvdkit.elastic.commits import Commits
from hvdkit.elastic.run import Adapter, elastic_function
from hvdkit.elastic.state import CommittedState
from hvdkit.errors import HOSTS_CHANGED, HvdkitError, UsageError
from hvdkit.runtime import progress, record_files
from hvdkit.runtime.elastic_start import HOSTS_FILE, ElasticStart
from tests.simulated.ranks import SimulatedCollectives, SimulatedGroup, on_every_rank


def state_of(value):
    """Return the parts of a state."""
    items = {"model": Plain(lambda: {"array": np.full(300, value)}, print)}
    return SnapshotMemory().copy(encoded({name: item.save() for name, item in items.items()}))


def value_of(found):
    """Return the value that `state_of` got, of a commit."""
    values = []
    parts.restore(found, {"model": Plain(dict, lambda tree: values.append(tree["array"][-1]))})
    return values[0]


def newest(folder, key=0):
    """Return the place in the order of commits, and the parts, of the newest commit of a host."""
    opened = HostSteps([folder / f"commits-{key}"]).newest()
    if opened is None:
        return None
    with opened:
        return key_of(opened.manifest), parts.read(opened)


def place_and_value(folder):
    place, found = newest(folder)
    return place, value_of(found)


class Ranks:
    """Simulated ranks with a host each. With `one_host`, only the first rank writes."""

    def __init__(self, folders, one_host=False):
        self.folders = folders
        self.one_host = one_host
        self.barrier = threading.Barrier(len(folders), timeout=20)

    def run(self, work, start=0, committed=False, ranks=None, key=0):
        def call(collectives):
            rank = collectives.rank
            if rank == 0:
                self.names = collectives.names
            elastic_start = ElasticStart([self.folders[rank]], start, 4, committed)
            writes = rank == 0 or not self.one_host
            commits = Commits(elastic_start, collectives, key, writes)
            try:
                return work(commits, rank)
            finally:
                commits.close()

        return on_every_rank(ranks or len(self.folders), call)

    def store(self, rank, value, start=0, number=1, key=0):
        """Store a commit on the host of one rank only."""
        commits = Commits(
            ElasticStart([self.folders[rank]], start, 4, False), one_rank(), key, True
        )
        commits._number = number - 1
        commits.store(state_of(value))
        commits.close()


def one_rank():
    return SimulatedCollectives(SimulatedGroup(1), 0)


@pytest.fixture
def world(tmp_path):
    folders = [tmp_path / f"host{i}" for i in range(3)]
    for folder in folders:
        folder.mkdir()
    return Ranks(folders)


def test_a_writer_that_is_killed_leaves_the_commit_before(world):
    world.store(0, 1)
    code = f"""
import os, pathlib, signal
from hvdkit.checkpoint import writing
from tests.elastic.test_commits import *

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

writing.Writer._read_back = killed
Ranks([pathlib.Path({str(world.folders[0])!r})]).store(0, 2, number=2)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert place_and_value(world.folders[0]) == ([1, 1], 1)
    world.store(0, 3, number=2)
    assert place_and_value(world.folders[0]) == ([1, 2], 3)


def test_the_launcher_learns_of_commits_with_lower_numbers_than_those_of_an_earlier_start(
    world, monkeypatch
):
    """A host that was left out of a start may have them. It has the newest commit nevertheless."""
    told = []
    monkeypatch.setattr("hvdkit.elastic.commits.report_committed", lambda: told.append(True))
    world.store(0, 1, number=9)
    world.store(0, 2, start=2, number=4)
    assert len(told) == 2


def test_the_rank_with_the_newest_commit_sends_it(world, monkeypatch):
    """A host that was left out of a start may have commits with higher numbers."""
    monkeypatch.setattr(parts, "_PIECE_BYTES", 1024)
    world.store(0, 1, number=9)
    world.store(1, 2, start=1, number=3)

    def work(commits, rank):
        holder, own = commits.newest()
        found = []
        items = {"model": Plain(dict, lambda tree: found.extend({*tree["array"].tolist()}))}
        parts.restore_everywhere(commits._collectives, own, items, holder, "x")
        commits.store(state_of(*found))
        return holder, found, bool(own)

    assert world.run(work, start=2) == [(1, [2], rank == 1) for rank in range(3)]
    assert [place_and_value(folder) for folder in world.folders] == [([3, 4], 2)] * 3


def test_another_host_sends_its_commit_if_the_newest_one_is_damaged(world, monkeypatch, caplog):
    for rank, number in enumerate((2, 2, 1)):
        world.store(rank, number, number=number)
    damaged = []

    def read(opened):
        # As a chunk that is not read when the commit is opened.
        if any(str(folder) in opened.location for folder in damaged):
            raise Damaged("model.safetensors: its content is not what was written", "")
        return parts.read(opened)

    monkeypatch.setattr("hvdkit.elastic.commits.read", read)

    def work(commits, rank):
        found = commits.newest()
        if found is None:
            return None
        holder, own = found
        return holder, value_of(own) if own else None

    for folder, expected in zip(
        world.folders,
        ([(1, None), (1, 2), (1, None)], [(2, None), (2, None), (2, 1)], [None] * 3),
        strict=True,
    ):
        damaged.append(folder)
        assert world.run(work, start=1, committed=True) == expected
    assert "the training starts from its beginning" in caplog.records[-1].getMessage()


def test_a_restored_commit_is_progress_if_its_content_is_new(world, monkeypatch, tmp_path):
    """After progress, the launcher permits all restarts again.

    A script may fail after its training function, again and again, and must not restart forever.
    """
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))

    def work(commits, rank, value):
        commits.newest()
        world.barrier.wait()
        saved = (tmp_path / record_files.SAVED).exists()
        world.barrier.wait()
        commits.store(state_of(value))
        commits.wait()
        assert (tmp_path / record_files.COMMITTED).exists()
        world.barrier.wait()
        (tmp_path / record_files.SAVED).unlink(missing_ok=True)
        return saved

    # The commit of start 2 has the same content as that of start 1.
    found = [
        world.run(functools.partial(work, value=v), start=n) for n, v in enumerate((1, 2, 2, 3, 3))
    ]
    assert found == [[each] * 3 for each in (False, True, True, False, True)]


class Unordered:
    """Values that each process pickles in another order, as a set of strings."""

    order = 0

    def __getstate__(self):
        return {"order": Unordered.order}


def test_a_restored_state_is_no_progress_if_it_is_pickled_in_another_order(
    in_elastic_job, monkeypatch, tmp_path
):
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))
    saved = tmp_path / record_files.SAVED

    @started
    def train(state):
        if state.epochs and state.resets:
            # The restored state was complete before the training function began.
            assert newest(tmp_path)[0][0] == Unordered.order + 1
        state.epochs = 1
        state.commit()

    for number, expected in enumerate((False, True, False, False)):
        monkeypatch.setenv("HVDKIT_ELASTIC_START", str(number))
        monkeypatch.setattr(run, "_keys", itertools.count())
        monkeypatch.setattr(Unordered, "order", number)
        train(StartedState(values=Unordered()))
        assert saved.exists() == expected
        saved.unlink(missing_ok=True)


def test_no_commit_at_all(world, caplog):
    assert world.run(lambda commits, _: commits.newest()) == [None] * 3
    assert not caplog.records
    assert world.run(lambda commits, _: commits.newest(), committed=True) == [None] * 3
    (record,) = caplog.records
    assert "every host that held a commit of the elastic state is lost" in record.getMessage()
    caplog.clear()
    # A script with several states: this one had no commit before the failure.
    world.store(1, 1, key=3)
    assert world.run(lambda commits, _: commits.newest(), committed=True) == [None] * 3
    assert not caplog.records


def test_the_hosts_with_a_commit_of_a_later_state_stay_those_with_the_newest_commit(
    world, monkeypatch, tmp_path
):
    """The launcher may else end them before the script uses the later state."""
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))
    world.store(1, 1, key=0)
    world.store(1, 2, key=2)
    (tmp_path / record_files.COMMITTED).unlink()

    def work(commits, rank):
        commits.newest()
        commits.store(state_of(3))

    world.run(work, start=1)
    assert not (tmp_path / record_files.COMMITTED).exists()
    world.run(work, start=1, key=2)
    assert (tmp_path / record_files.COMMITTED).exists()


@pytest.mark.parametrize("one_host", [True, False])
def test_each_host_stores_the_values_of_the_first_rank(world, one_host):
    """The ranks of a host need no further collective for this."""
    world = Ranks(world.folders, one_host)

    def work(commits, rank):
        assert commits.newest() is None
        if rank == 0:
            world.names.clear()
        state = WindowState(commits, False, best=f"of rank {rank}")
        state.commit()
        return state.best

    assert world.run(work) == [f"of rank {rank}" for rank in range(3)]
    more = [] if one_host else ["hvdkit.checkpoint.values"]
    assert world.names == ["hvdkit.checkpoint.step", *more, "hvdkit.elastic.commit"]
    for rank, folder in enumerate(world.folders):
        if rank == 0 or not one_host:
            state = WindowState(None, False, best="")
            state._saved = newest(folder)[1]
            state.restore()
            assert state.best == "of rank 0"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("file", "newest commit cannot be read .rank 1: OSError"),
        ("save", "commit 5 of the elastic state was not stored.*rank 0: MemoryError"),
        ("begin", "commit 4 of the elastic state was not stored.*rank 1: .*twice as much free"),
        ("write", "commit 5 of the elastic state was not stored.*rank 1: .*No space"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_ranks(world, monkeypatch, broken, said):
    world.store(1, 1, start=1, number=3)

    def work(commits, rank):
        def fails(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        if rank == 1 and broken == "file":
            monkeypatch.setattr("hvdkit.elastic.commits.read", fails)
        if rank == 1 and broken == "begin":
            monkeypatch.setattr("hvdkit.checkpoint.host_steps.nbytes", lambda _: 1 << 60)
        commits.newest()
        if rank == 1 and broken == "write":
            commits._steps._open(0, 3).write = fails
        commits.store(state_of(2))
        problem = MemoryError() if (broken, rank) == ("save", 0) else None
        commits.store(state_of(3), problem=problem)

    for error in world.run(work, start=2):
        assert isinstance(error, HvdkitError)
        assert re.search(said, str(error))
    if broken == "save":
        # The other hosts do not store the values of another rank than the first one.
        assert [place_and_value(folder) for folder in world.folders] == [([3, 4], 2)] * 3


def test_a_change_that_one_host_knows_ends_all_ranks(world):
    assert world.run(lambda commits, _: commits.hosts_changed()) == [False] * 3
    (world.folders[1] / HOSTS_FILE).write_text("5")
    assert world.run(lambda commits, _: commits.hosts_changed()) == [True] * 3

    def work(commits, rank):
        assert commits.newest() is None
        changed = commits.store(state_of(rank))
        # The ranks end now.
        return changed and place_and_value(world.folders[rank])

    assert world.run(work) == [([1, 1], rank) for rank in range(3)]
    # Of a start before.
    (world.folders[1] / HOSTS_FILE).write_text("3")
    assert world.run(lambda commits, _: commits.hosts_changed()) == [False] * 3


class Interrupt(Exception):
    pass


def adapter(size=2):
    def in_process(func):
        return lambda *args: ("in process", func(*args))

    return Adapter(lambda: None, lambda: 0, lambda: size, lambda: None, in_process, Interrupt)


class Base:
    """The base class of a state; Horovod's class in a job."""

    def __init__(self, **kwargs):
        self._saved_state = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def check_host_updates(self):
        pass


class WindowState(CommittedState, Base):
    """A state with an optimizer that accumulates gradients."""

    _interrupt = Interrupt

    def __init__(self, commits, in_window, **kwargs):
        self.saves = -1
        super().__init__(**kwargs)
        self._commits = commits
        self.in_window = in_window

    def save(self):
        super().save()
        self.saves += 1

    def _make_boundary(self):
        return StepBoundary(lambda: (1,) if self.in_window else None, lambda: self.in_window)


OF_SCRIPT = """
import enum, pathlib, sys
import numpy as np
from hvdkit.elastic.parts import Pickled

class Phase(enum.Enum):
    WARMUP = 1

def next_phase():
    return Phase.WARMUP

found = []
item = Pickled(lambda: [Phase.WARMUP, next_phase, lambda: next_phase()], found.extend)
file = pathlib.Path(sys.argv[1])
if not file.exists():
    file.write_bytes(item.save().tobytes())
else:
    item.restore(np.frombuffer(file.read_bytes(), np.uint8))
    assert found[:2] == [Phase.WARMUP, next_phase] and found[2]() is Phase.WARMUP
"""


def test_objects_keep_the_classes_of_the_script(tmp_path):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", OF_SCRIPT, tmp_path / "file"], check=True, timeout=60)


@pytest.mark.parametrize("method", ["commit", "check_host_updates"])
def test_nothing_is_committed_within_an_accumulation_window(world, caplog, method):
    """One rank is in a window, and the hosts have changed. The ranks end after the window."""
    (world.folders[1] / HOSTS_FILE).write_text("5")

    def work(commits, rank):
        state, folder = WindowState(commits, rank == 2), world.folders[rank]
        for _ in range(2):
            getattr(state, method)()
        within = newest(folder), state.saves
        state.in_window = False
        with pytest.raises(Interrupt):
            getattr(state, method)()
        return within, newest(folder)[0], state.saves

    assert world.run(work) == [((None, 0), [1, 1], 1)] * 3
    warned = [record for record in caplog.records if "window is open" in record.getMessage()]
    assert len(warned) == (method == "commit")


def test_a_rank_without_windows_commits_with_the_others(world):
    """The last rank has no optimizer that accumulates gradients, such as in another process set."""

    def work(commits, rank):
        plain = type(
            "PlainState", (WindowState,), {"_make_boundary": CommittedState._make_boundary}
        )
        state = (plain if rank == 2 else WindowState)(commits, True)
        state.commit()
        state.in_window = False
        state.commit()
        return state.saves

    assert world.run(work) == [1] * 3


def test_commits_that_are_always_within_windows_are_stored(world, caplog):
    """Rank 2 is in the same window in two commits in a row, and then in another one."""
    (world.folders[1] / HOSTS_FILE).write_text("5")

    def work(commits, rank):
        state = WindowState(commits, False)
        for window in (1, 1):
            state.in_window = window if rank == 2 else False
            state.commit()
        assert not state.saves
        state.in_window = 2 if rank == 2 else False
        with pytest.raises(Interrupt):
            state.check_host_updates()
        return newest(world.folders[rank])[0], state.saves

    assert world.run(work) == [([1, 1], 1)] * 3
    texts = [record.getMessage() for record in caplog.records]
    assert sum("committed while gradients wait" in text for text in texts) == 1


class PlainState:
    def sync(self):
        self.synced = True


def test_a_job_that_is_not_elastic_calls_the_function(monkeypatch):
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    state = PlainState()
    assert elastic_function(lambda s: s.synced, adapter())(state) is True
    # Alone, a rank can start again in its process. Horovod's launcher starts it again.
    assert elastic_function(lambda s: 1, adapter(size=1))(state) == ("in process", 1)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert elastic_function(lambda s: 1, adapter())(state) == ("in process", 1)


started = functools.partial(elastic_function, adapter=replace(adapter(), collectives=one_rank))


class StartedState(CommittedState, Base):
    """A state that counts its resets, and has a number of epochs."""

    _interrupt = Interrupt
    resets = rank = 0

    def __init__(self, **kwargs):
        super().__init__(epochs=0, **kwargs)

    def _rank(self):
        return self.rank

    def _collectives(self):
        return one_rank()

    def on_reset(self):
        self.resets += 1


def test_a_state_that_is_trained_in_several_calls(monkeypatch, tmp_path):
    """The reset callbacks run after a restore, and at the first call of a restarted process."""
    folder = tmp_path / "host"
    folder.mkdir()

    @started
    def train(state):
        state.epochs += 1
        state.commit()
        return state.epochs, state.resets

    def start(number, calls):
        variables = ElasticStart([folder], number, 0, number > 0).variables()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(run, "_keys", itertools.count())
        state = StartedState()
        return [train(state) for _ in range(calls)]

    assert start(0, 2) == [(1, 0), (2, 0)]
    # Each of the first two calls resumes from its own commit.
    assert start(1, 4) == [(2, 1), (3, 2), (4, 2), (5, 2)]


@pytest.fixture
def in_elastic_job(monkeypatch, tmp_path):
    for name, value in ElasticStart([tmp_path], 0, 0, False).variables().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("method", ["commit", "check_host_updates"])
def test_a_commit_of_another_state_than_that_of_the_function(in_elastic_job, method):
    """Nothing would store it."""

    @started
    def train(state):
        with pytest.raises(UsageError, match="stores only the state of the function"):
            getattr(other, method)()
        state.epochs = 1
        state.commit()
        state.epochs = 2
        state.restore()
        return state.epochs

    state, other = StartedState(), StartedState()
    assert train(state) == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["commit", "check_host_updates"])
def test_a_commit_outside_the_function_warns_once(in_elastic_job, caplog, method, rank):
    """A script of Horovod may call it before the function, where it changes nothing."""
    state = StartedState()
    state.rank = rank
    getattr(state, method)()
    getattr(state, method)()
    warned = [record.getMessage() for record in caplog.records]
    assert [("no commit is stored" in text) for text in warned] == [True] * (rank == 0)


def test_nested_functions_are_an_error(in_elastic_job, tmp_path):
    """The commits of the outer call after the inner one would be lost."""

    @started
    def inner(state):
        return state.epochs

    @started
    def train(state):
        for each in (state, StartedState()):
            with pytest.raises(UsageError, match="within another elastic training function"):
                inner(each)
        state.epochs = 3
        state.commit()

    state = StartedState()
    train(state)
    state._saved = newest(tmp_path, next(run._keys) - 1)[1]
    state.restore()
    assert state.epochs == 3
    assert inner(state) == 3


def test_the_launcher_learns_that_a_script_ends_because_the_hosts_have_changed(
    in_elastic_job, monkeypatch
):
    noted = []
    monkeypatch.setattr(run, "note_end_with", noted.append)

    @started
    def train(state):
        raise Interrupt

    with pytest.raises(SystemExit) as ended:
        train(StartedState())
    assert ended.value.code == HOSTS_CHANGED
    assert noted == [HOSTS_CHANGED]


def test_a_state_without_commits(in_elastic_job):
    with pytest.raises(UsageError, match="PlainState, whose commits cannot be stored"):
        elastic_function(lambda s: 1, adapter())(PlainState())


def test_the_status_of_changed_hosts_is_no_other():
    assert HOSTS_CHANGED == errno.ERESTART
    assert HOSTS_CHANGED not in range(os.EX_USAGE, os.EX_CONFIG + 1)
