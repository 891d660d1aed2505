"""Commits of elastic states on hosts: folders of their own, and ranks in threads."""

import errno
import functools
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit import record_files
from hvdkit.core import progress
from hvdkit.core.elastic import run
from hvdkit.core.elastic.commits import CommitId, CommitStore
from hvdkit.core.elastic.committer import Committer
from hvdkit.core.elastic.run import Adapter, elastic_function
from hvdkit.core.elastic.start import HOSTS_FILE, ElasticStart
from hvdkit.core.elastic.state import CommittedState
from hvdkit.core.step_boundary import StepBoundary
from hvdkit.errors import HOSTS_CHANGED, HvdkitError, UsageError
from tests.core.simulated_ranks import SimulatedCollectives, SimulatedGroup, on_every_rank

CONTENT = bytes(range(256)) * 4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr("hvdkit.core.elastic.committer._CHUNK_BYTES", 100)


def writes(content):
    return lambda file, *_: file.write(content)


def newest(store):
    commit = store.newest()
    return None if commit is None else (commit.id, commit.path.read_bytes())


def test_a_commit_replaces_the_one_before(tmp_path):
    store = CommitStore([tmp_path], 0)
    assert store.newest() is None
    store.write(CommitId(0, 1), writes(b"one"))
    store.write(CommitId(0, 2), writes(b"two"))
    assert newest(store) == (CommitId(0, 2), b"two")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_folder_is_followed_by_the_next(tmp_path):
    folders = [tmp_path / "memory", tmp_path / "disk"]
    for folder in folders:
        folder.mkdir()

    def write(file):
        file.write(b"half")
        if Path(file.name).parent == folders[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = CommitStore(folders, 0)
    store.write(CommitId(0, 1), writes(b"fits"))
    store.write(CommitId(0, 2), write)
    assert newest(store) == (CommitId(0, 2), b"half")
    assert not list(folders[0].iterdir())
    with pytest.raises(OSError, match="No space"):
        CommitStore(folders[:1], 0).write(CommitId(0, 3), write)


def test_a_state_that_cannot_be_pickled_leaves_no_draft(tmp_path):
    """The draft would stay in the memory of the host."""
    store = CommitStore([tmp_path], 0)
    store.write(CommitId(0, 1), writes(b"one"))

    def write(file):
        file.write(b"two")
        raise TypeError("cannot pickle")

    with pytest.raises(TypeError, match="cannot pickle"):
        store.write(CommitId(0, 2), write)
    assert newest(store) == (CommitId(0, 1), b"one")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_writer_that_is_killed_leaves_the_commit_before(tmp_path):
    store = CommitStore([tmp_path], 0)
    store.write(CommitId(0, 1), writes(b"one"))
    code = f"""
import os, signal
from pathlib import Path
from hvdkit.core.elastic.commits import CommitId, CommitStore

def write(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

CommitStore([Path({str(tmp_path)!r})], 0).write(CommitId(0, 2), write)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert newest(store) == (CommitId(0, 1), b"one")
    store.write(CommitId(0, 2), writes(b"two"))
    assert len(list(tmp_path.iterdir())) == 1


class Ranks:
    """Simulated ranks with a host each. With `one_host`, only the first rank writes."""

    def __init__(self, folders, one_host=False):
        self.folders = folders
        self.one_host = one_host
        self.barrier = threading.Barrier(len(folders), timeout=20)

    def run(self, work, start=0, committed=False):
        def call(collectives):
            rank = collectives.rank
            if rank == 0:
                self.names = collectives.names
            elastic_start = ElasticStart([self.folders[rank]], start, 4, committed)
            writes = rank == 0 or not self.one_host
            return work(Committer(elastic_start, collectives, 0, writes), rank)

        return on_every_rank(len(self.folders), call)


def one_rank():
    return SimulatedCollectives(SimulatedGroup(1), 0)


def resumed(committer):
    """Return the path and content of the commit, in a list; [] without a commit."""
    found = []
    assert committer.resume(lambda path: found.append((path, path.read_bytes()))) == bool(found)
    return found


@pytest.fixture
def world(tmp_path):
    folders = [tmp_path / f"host{i}" for i in range(3)]
    for folder in folders:
        folder.mkdir()
    return Ranks(folders)


def test_the_newest_commit_is_copied_to_the_hosts_that_lack_it(world):
    CommitStore([world.folders[0]], 0).write(CommitId(0, 9), writes(b"given up"))
    CommitStore([world.folders[1]], 0).write(CommitId(1, 3), writes(CONTENT))

    def work(committer, rank):
        (path, content), *more = resumed(committer)
        committer.commit(writes(b"next"))
        return not more and path.parent == world.folders[rank] and content

    assert world.run(work, start=2) == [CONTENT] * 3
    for folder in world.folders:
        assert newest(CommitStore([folder], 0)) == (CommitId(2, 4), b"next")


def test_the_commits_of_all_states_are_copied(world):
    """The launcher may end the hosts that have them before the script uses the other states."""
    for key in (0, 2):
        CommitStore([world.folders[key]], key).write(CommitId(0, key), writes(CONTENT))
    assert [len(found) for found in world.run(lambda committer, _: resumed(committer))] == [1] * 3
    for folder in world.folders:
        for key in (0, 2):
            assert newest(CommitStore([folder], key)) == (CommitId(0, key), CONTENT)


def test_a_commit_counts_as_progress(world, monkeypatch, tmp_path):
    """After it, the launcher permits all restarts again."""
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))

    def work(committer, rank):
        resumed(committer)
        assert not (tmp_path / record_files.SAVED).exists()
        world.barrier.wait()
        committer.commit(writes(CONTENT))
        world.barrier.wait()
        return (tmp_path / record_files.SAVED).exists()

    assert world.run(work, start=0) == [True] * 3


def test_a_commit_that_equals_the_restored_one_is_no_progress(world, monkeypatch, tmp_path):
    """But the launcher learns that the new hosts have the commit."""
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))
    CommitStore([world.folders[0]], 0).write(CommitId(0, 9), writes(b"given up"))
    CommitStore([world.folders[1]], 0).write(CommitId(1, 3), writes(CONTENT))

    def work(committer, rank):
        resumed(committer)
        committer.note_restored(lambda: b"restored")
        world.barrier.wait()
        found = [(tmp_path / record_files.COMMITTED).exists()]
        # The first rank decides: later values of a state may differ between ranks.
        for content in (b"restored", b"new"):
            own = content if rank == 0 else b"other"
            committer.commit(writes(CONTENT), digest=functools.partial(bytes, own))
            world.barrier.wait()
            found.append((tmp_path / record_files.SAVED).exists())
            world.barrier.wait()
        return found

    assert world.run(work, start=2) == [[True, False, True]] * 3


def test_no_commit_at_all(world, caplog):
    assert world.run(lambda committer, _: resumed(committer)) == [[]] * 3
    assert not caplog.records
    assert world.run(lambda committer, _: resumed(committer), committed=True) == [[]] * 3
    (record,) = caplog.records
    assert "every host that held a commit of the elastic state is lost" in record.getMessage()
    caplog.clear()
    # A script with several states: this one had no commit before the failure.
    CommitStore([world.folders[1]], 3).write(CommitId(0, 1), writes(CONTENT))
    assert world.run(lambda committer, _: resumed(committer), committed=True) == [[]] * 3
    assert not caplog.records


@pytest.mark.parametrize("one_host", [True, False])
def test_each_host_stores_the_values_of_the_first_rank(world, one_host):
    """The ranks of a host need no further collective for this."""
    world = Ranks(world.folders, one_host)

    def work(committer, rank):
        committer.resume(pytest.fail)
        if rank == 0:
            world.names.clear()
        state = WindowState(committer, False)
        state._saved_state = {"best": f"of rank {rank}"}
        state.commit()
        world.barrier.wait()
        assert state._saved_state == {"best": f"of rank {rank}"}
        commit = newest(CommitStore([world.folders[rank]], 0))
        return commit and pickle.loads(commit[1])

    of_first = {"best": "of rank 0"}
    assert world.run(work) == [of_first, *[None if one_host else of_first] * 2]
    more = [] if one_host else ["hvdkit.elastic.values"]
    assert world.names == ["hvdkit.elastic.window", *more, "hvdkit.elastic.commit"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("folder", "cannot be read: rank 1: FileNotFoundError"),
        ("file to copy", "not copied to a new host: rank 1: (PermissionError|OSError)"),
        ("load", "commit 3 of the elastic state was not restored: rank 1: EOFError. Put"),
        ("save", "commit 4 of the elastic state was not stored: rank 1: MemoryError. Two"),
        ("write", "commit 4 of the elastic state was not stored: rank 1: TypeError"),
        ("values", "commit 4 of the elastic state was not stored: rank 0: TypeError"),
        ("copy", "not copied to a new host: rank 2: IsADirectoryError"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_ranks(world, monkeypatch, broken, said):
    CommitStore([world.folders[1]], 0).write(CommitId(1, 3), writes(CONTENT))
    if broken == "folder":
        world.folders[1].rename(world.folders[1].with_name("gone"))
    if broken == "copy":
        (world.folders[2] / "0.draft").mkdir()
    if broken == "file to copy":

        def no_map(path, *_):
            raise PermissionError(f"no access to {path}")

        monkeypatch.setattr("hvdkit.core.elastic.committer.np.memmap", no_map)

    def work(committer, rank):
        def fails(_):
            if (broken, rank) == ("load", 1):
                raise EOFError

        def saves():
            if (broken, rank) == ("save", 1):
                raise MemoryError

        def write(file, *_):
            if (broken, rank) == ("write", 1):
                raise TypeError("cannot pickle '_thread.lock' object")
            file.write(b"next")

        committer.resume(fails)
        committer.commit(write, saves, values=threading.Lock if broken == "values" else lambda: 0)

    for error in world.run(work, start=2):
        assert isinstance(error, HvdkitError)
        assert re.search(said, str(error))
    if broken == "values":
        for folder in world.folders:
            assert newest(CommitStore([folder], 0)) == (CommitId(1, 3), CONTENT)


def test_a_change_that_one_host_knows_ends_all_ranks(world):
    assert world.run(lambda committer, _: committer.hosts_changed()) == [False] * 3
    (world.folders[1] / HOSTS_FILE).write_text("5")
    assert world.run(lambda committer, _: committer.hosts_changed()) == [True] * 3
    assert world.run(lambda committer, _: committer.commit(writes(b""))) == [True] * 3
    # Of a start before.
    (world.folders[1] / HOSTS_FILE).write_text("3")
    assert world.run(lambda committer, _: committer.hosts_changed()) == [False] * 3


class Interrupt(Exception):
    pass


def adapter(size=2):
    def in_process(func):
        return lambda *args: ("in process", func(*args))

    return Adapter(lambda: None, lambda: 0, lambda: size, lambda: None, in_process, Interrupt)


class Saved:
    """The base class of a state; Horovod's class in a job."""

    def save(self):
        self.saves += 1

    def check_host_updates(self):
        pass


SAVED = pickle.dumps({})


class WindowState(CommittedState, Saved):
    """A state with an optimizer that accumulates gradients."""

    _interrupt = Interrupt

    def __init__(self, committer, in_window):
        self._committer = committer
        self._saved_state = {}
        self.in_window = in_window
        self.saves = 0

    def _make_boundary(self):
        return StepBoundary(lambda: (1,) if self.in_window else None, lambda: self.in_window)

    def write_saved(self, file):
        pickle.dump(self._values_to_write()["objects"], file)


@pytest.mark.parametrize("method", ["commit", "check_host_updates"])
def test_nothing_is_committed_within_an_accumulation_window(world, caplog, method):
    """One rank is in a window, and the hosts have changed. The ranks end after the window."""
    (world.folders[1] / HOSTS_FILE).write_text("5")

    def work(committer, rank):
        state, store = WindowState(committer, rank == 2), CommitStore([world.folders[rank]], 0)
        for _ in range(2):
            getattr(state, method)()
        within = (newest(store), state.saves)
        state.in_window = False
        with pytest.raises(Interrupt):
            getattr(state, method)()
        return within, newest(store), state.saves

    after = (CommitId(0, 1), SAVED), 1
    assert world.run(work) == [((None, 0), *after)] * 3
    warned = [record for record in caplog.records if "window is open" in record.getMessage()]
    assert len(warned) == (method == "commit")


def test_a_rank_without_windows_commits_with_the_others(world):
    """The last rank has no optimizer that accumulates gradients, such as in another process set."""

    def work(committer, rank):
        plain = type(
            "PlainState", (WindowState,), {"_make_boundary": CommittedState._make_boundary}
        )
        state = (plain if rank == 2 else WindowState)(committer, True)
        state.commit()
        state.in_window = False
        state.commit()
        return state.saves

    assert world.run(work) == [1] * 3


def test_commits_that_are_always_within_windows_are_stored(world):
    """Rank 2 is in the same window in two commits in a row, and then in another one."""
    (world.folders[1] / HOSTS_FILE).write_text("5")

    def work(committer, rank):
        state = WindowState(committer, False)
        for window in (1, 1):
            state.in_window = window if rank == 2 else False
            state.commit()
        assert not state.saves
        state.in_window = 2 if rank == 2 else False
        with pytest.raises(Interrupt):
            state.check_host_updates()
        return newest(CommitStore([world.folders[rank]], 0)), state.saves

    assert world.run(work) == [((CommitId(0, 1), SAVED), 1)] * 3


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


class StartedState(CommittedState, Saved):
    """A state that counts its resets and writes its number of epochs."""

    _interrupt = Interrupt
    epochs = resets = rank = 0

    def __init__(self):
        self._saved_state = {}

    def _rank(self):
        return self.rank

    def on_reset(self):
        self.resets += 1

    def sync(self):
        pass

    def save(self):
        pass

    def restore(self):
        pass

    def write_saved(self, file):
        file.write(b"%d" % self.epochs)

    def read_saved(self, path):
        self.epochs = int(path.read_bytes())


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
        state.commit()
        return state.saves

    state, other = CountedState(), StartedState()
    assert train(state) == 1


class CountedState(StartedState):
    saves = 0

    def save(self):
        self.saves += 1


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
    (commit,) = tmp_path.glob("*.commit")
    assert commit.read_bytes() == b"3"
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
