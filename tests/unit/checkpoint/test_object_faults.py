"""Faults of servers and networks: no good step is lost, and all listed steps are good."""

import contextlib
import dataclasses
import itertools
import os
import random
import secrets
import signal
import socket
import threading
import time
import traceback
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
import s3fs

from hvdkit.checkpoint.errors import CheckpointError, WriterConflict
from hvdkit.checkpoint.lease import Lease
from hvdkit.checkpoint.objects import bucket, files, listing, writing
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.step_files import EncodedPart
from hvdkit.checkpoint.store import Store
from tests.unit.checkpoint import s3_server
from tests.unit.checkpoint.material import (
    assert_newest_good,
    before_commit,
    leftovers,
    names,
    path_of,
    save,
    snapshot,
)

CHANGES = {"PUT", "POST", "DELETE"}


@pytest.fixture
def quick(monkeypatch):
    """Shorten the time in which a failing request is repeated."""
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(bucket, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(bucket, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


def through(proxy, place, **settings):
    """A store behind the proxy."""
    return Store(str(place), storage_options={"endpoint_url": proxy.address}, **settings)


@pytest.mark.parametrize(
    "fault",
    ["500", "lost", *(pytest.param(fault, marks=pytest.mark.long) for fault in ("503", "cut"))],
)
def test_every_request_may_fail_once(on_s3, s3_proxy, monkeypatch, fault):
    monkeypatch.setattr(bucket, "FIRST_PAUSE_SECONDS", 0.01)
    save(on_s3, 1, 2, keep_last=2)
    seen = set()

    def act(number, method, path):
        if (method, path) in seen:
            return None
        seen.add((method, path))
        return fault

    s3_proxy.act = act
    store = through(s3_proxy, on_s3, keep_last=2)
    write(store, 3)
    assert_newest_good(store, 3)
    assert [info.step for info in store.steps()] == [2, 3]
    assert leftovers(on_s3) == []
    assert len(seen) > 20


def test_a_retry_does_not_change_the_random_numbers_of_the_script(on_s3, s3_proxy, monkeypatch):
    monkeypatch.setattr(bucket, "FIRST_PAUSE_SECONDS", 0.01)
    save(on_s3, 1)
    s3_proxy.act = lambda number, method, path: "500" if number in (1, 3, 4) else None
    before = random.getstate()
    write(through(s3_proxy, on_s3), 2)
    assert len(s3_proxy.seen) > 4
    assert random.getstate() == before


class Outage:
    """A server that fails from a request on, counted from `begin`.

    This request is executed, and its reply is lost.
    """

    def __init__(self, begin, number):
        self.first = begin + number

    def __call__(self, number, method, path):
        if number < self.first:
            return None
        return "lost" if number == self.first else "500"


def test_the_server_may_fail_from_any_request_on(on_s3, s3_proxy, quick, request):
    for number in itertools.count(1, 1 if request.config.getoption("--long") else 7):
        place = on_s3 / str(number)
        save(place, 1, 2, keep_last=2)
        store = through(s3_proxy, place, keep_last=2)
        with store.open_for_writing() as writer:
            s3_proxy.act = outage = Outage(len(s3_proxy.seen), number)
            said = ""
            try:
                writer.write(snapshot(3))
            except CheckpointError as error:
                said = str(error)
            reached = len(s3_proxy.seen) >= outage.first
            s3_proxy.act = lambda *_: None
            for info in store.steps():
                assert store.verify(info.step) == []
            assert store.steps()[-1].step in ((2, 3) if said else (3,))
            assert not said or "the steps that `hvdkit checkpoint ls` lists are complete" in said
            # The server works again.
            writer.write(snapshot(4))
            assert_newest_good(store, 4)
        with store.open_for_writing():
            pass
        assert leftovers(place) == []
        if not reached:
            break
    assert number > 10


def in_a_process(work, *arguments):
    """Start `work` in a new process. Return its process ID."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            work(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


class Killer:
    """Kill the process `pid` at a request that changes the store, after `spared` such requests.

    This request is executed, and its reply is lost.
    """

    def __init__(self, spared):
        self.spared = spared
        self.changes = []
        self.pid = None

    def __call__(self, number, method, path):
        if method not in CHANGES:
            return None
        self.changes.append(f"{method} {path}")
        if len(self.changes) <= self.spared:
            return None
        if len(self.changes) == self.spared + 1:
            os.kill(self.pid, signal.SIGKILL)
        return "lost"


def write(store, step):
    with store.open_for_writing() as writer:
        writer.write(snapshot(step))


@pytest.mark.long
@pytest.mark.parametrize("step", [3, 2], ids=["new", "once_more"])
def test_a_writer_killed_after_any_change_loses_nothing(on_s3, s3_proxy, step):
    for spared in itertools.count():
        place = on_s3 / str(spared)
        save(place, 1, 2, keep_last=2)
        store = through(s3_proxy, place, keep_last=2)
        s3_proxy.act = killer = Killer(spared)
        killer.pid = in_a_process(write, store, step)
        status = os.waitstatus_to_exitcode(os.waitpid(killer.pid, 0)[1])
        s3_proxy.act = lambda *_: None
        if status == 0:
            break
        last = killer.changes[spared]
        assert status == -signal.SIGKILL, last
        for info in store.steps():
            assert store.verify(info.step) == [], last
        newest = store.steps()[-1].step
        assert newest in (2, step), last
        assert_newest_good(store, newest)
        with store.open_for_writing() as writer:
            writer.write(snapshot(4))
        assert_newest_good(store, 4)
        assert leftovers(place) == [], last
    assert any("/committed.json" in change for change in killer.changes)
    assert spared > 10


def test_outdated_listings(on_s3, s3_proxy):
    save(on_s3, 1)
    s3_proxy.act = lambda number, method, path: "stale" if "list-type" in path else None
    with pytest.raises(CheckpointError, match="the listings of s3://.* are outdated"):
        through(s3_proxy, on_s3).open_for_writing()
    s3_proxy.act = lambda number, method, path: None
    save(on_s3, 2)
    assert [info.step for info in Store(str(on_s3)).steps()] == [1, 2]


def objects_of(place):
    """Return name -> content of all objects under a URL."""
    there = Bucket(str(place), {})
    return {name: there.read(name, size) for name, size in there.sizes().items()}


@pytest.mark.parametrize("answer", ["unconditional", "501"])
@pytest.mark.parametrize("steps", [(), (1, 2)], ids=["empty", "with_steps"])
def test_a_store_without_conditional_writes_is_refused(on_s3, s3_proxy, answer, steps):
    save(on_s3, *steps)
    before = objects_of(on_s3)
    s3_proxy.act = lambda number, method, path: answer
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="does not support conditional writes") as caught:
            through(s3_proxy, on_s3).open_for_writing()
        assert time.monotonic() - began < 30
        # Neither a lease nor the object of the check is left.
        assert objects_of(on_s3) == before
    said = (
        "it overwrote an existing object" if answer == "unconditional" else "it refused to create"
    )
    assert said in str(caught.value)
    s3_proxy.act = lambda number, method, path: None
    write(through(s3_proxy, on_s3), 3)
    assert_newest_good(Store(str(on_s3)), 3)


@pytest.mark.long
@pytest.mark.parametrize("place_on_server", ["azure", "rados"], indirect=True)
def test_one_of_several_creates_an_object(place_on_server):
    """Needed if several processes replace a dead writer at the same time.

    Not with moto, whose server looks for an object and then writes it, in several threads.
    """
    buckets = [Bucket(str(place_on_server), {}) for _ in range(4)]
    together = threading.Barrier(len(buckets))

    def create(there, name, content):
        together.wait(timeout=60)
        return there.create(name, content)

    with ThreadPoolExecutor(len(buckets)) as pool:
        for number in range(20):
            name = f"race/{number}"
            contents = [f"{number} of writer {writer}".encode() for writer in range(len(buckets))]
            created = list(pool.map(create, buckets, [name] * len(buckets), contents))
            assert created.count(True) == 1
            assert buckets[0].read(name, 1_000_000) == contents[created.index(True)]


def test_the_check_for_conditional_writes_leaves_nothing(on_s3, s3_proxy):
    with through(s3_proxy, on_s3).open_for_writing():
        probes = [request for request in s3_proxy.seen if "probe" in request[1]]
        assert [method for method, _ in probes if method in CHANGES] == ["PUT", "PUT", "DELETE"]
        assert not [name for name in objects_of(on_s3) if "probe" in name]


def test_another_writer_may_delete_the_object_of_the_check(on_s3, s3_proxy):
    """A new writer deletes all objects of other writers under `writers/`."""
    deleted = []

    def act(number, method, path):
        if not deleted and method == "PUT" and s3_proxy.seen.count((method, path)) == 2:
            there = Bucket(str(on_s3), {})
            deleted.extend(name for name in there.sizes("writers") if "probe" in name)
            there.delete(deleted)

    s3_proxy.act = act
    write(through(s3_proxy, on_s3), 1)
    assert len(deleted) == 1
    assert_newest_good(Store(str(on_s3)), 1)
    assert leftovers(on_s3) == []


def test_a_server_that_never_answers(on_s3, monkeypatch, quick):
    monkeypatch.setattr(bucket, "FIRST_REQUEST_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {"endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        store = Store(str(on_s3), storage_options=options)
        with pytest.raises(CheckpointError, match=r"cannot list s3://.*: no reply in time"):
            store.newest_good()


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        (
            "s3://no-such-bucket/run",
            {},
            "cannot use s3://no-such-bucket/run: .*Create",
        ),
        ("s3://checkpoints/run", {"endpoint_url": "http://127.0.0.1:9"}, "Could not connect"),
    ],
)
def test_an_address_that_is_wrong(on_s3, quick, url, options, said):
    with pytest.raises(CheckpointError, match=said):
        Store(url, storage_options=options).open_for_writing()


def test_large_files_are_sent_and_read_in_parts(on_s3, s3_proxy, monkeypatch):
    monkeypatch.setattr(bucket, "_PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(files, "_BLOCK_BYTES", 2_000_000)
    data = np.random.default_rng(0).integers(0, 256, 23_000_001, np.uint8)
    tensors = {name: (TensorSpec("U8", (data.size,)), data) for name in ("a", "b")}
    encoded = {name: {"$tensor": name} for name in tensors}
    large = dataclasses.replace(snapshot(1), parts={"model": EncodedPart(encoded, tensors)})
    with through(s3_proxy, on_s3).open_for_writing() as writer:
        writer.write(large)
    assert sum("partNumber" in path for _, path in s3_proxy.seen) == 9
    with Store(str(on_s3)).newest_good() as opened:
        stream = opened.stream("model")
        found = np.empty(2 * data.size, np.uint8)
        for at in range(0, found.size, 3_000_000):
            stream.read_into(found[at : at + 3_000_000])
    assert (found.reshape(2, -1) == data).all()


def leave_writer(place):
    """Create the lease of a writer on another host. Return its object and a new heartbeat."""
    there = Bucket(str(place), {})
    lease = dataclasses.replace(Lease.own(), host="elsewhere", machine="another")
    last = max(there.sizes("writers"), default="writers/000000000.json")
    name = f"writers/{int(last[8:17]) + 1:09d}.json"
    beats = itertools.count()
    assert there.create(name, lease.to_bytes(next(beats)))
    return name, lambda: there.write(name, lease.to_bytes(next(beats)))


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(writing, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(writing, "LEASE_TIMEOUT_SECONDS", 0.5)


def test_a_second_writer(on_s3, impatient):
    store = Store(str(on_s3))
    with store.open_for_writing() as writer:
        with pytest.raises(WriterConflict, match="already open for writing in this process"):
            store.open_for_writing()

        def elsewhere():
            writing._held.clear()
            with pytest.raises(WriterConflict, match=f"process {os.getppid()} on .* is writing"):
                store.open_for_writing()

        pid = in_a_process(elsewhere)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        # The attempts have no effect on the first writer.
        writer.write(snapshot(1))
    assert leftovers(on_s3) == []


def test_a_writer_on_another_host_without_heartbeats(on_s3, impatient):
    save(on_s3, 1)
    leave_writer(on_s3)
    save(on_s3, 2)
    assert_newest_good(Store(str(on_s3)), 2)


@pytest.mark.parametrize("version", ["this", "earlier"])
def test_a_writer_on_another_host_with_heartbeats(on_s3, impatient, monkeypatch, version):
    place = str(on_s3)
    if version == "this":
        lease, beat = leave_writer(place)
    else:
        place = of_an_earlier_version()
        there = Bucket(place, {})
        (lease,) = there.sizes("writers")
        left = Lease.parse(there.read(lease, 10_000))
        beats = itertools.count(1)

        def beat():
            there.write(lease, left.to_bytes(next(beats)))

    read = Bucket.read

    def beating(self, name, *arguments):
        if name == lease:
            beat()
        return read(self, name, *arguments)

    monkeypatch.setattr(Bucket, "read", beating)
    with pytest.raises(WriterConflict, match="on elsewhere is writing"):
        Store(place).open_for_writing()


def test_a_writer_on_another_host_that_closes_while_the_next_one_waits(
    on_s3, impatient, monkeypatch
):
    save(on_s3, 1)
    lease, _ = leave_writer(on_s3)
    read = Bucket.read
    reads = itertools.count()

    def closing(self, name, *arguments):
        if name == lease and next(reads) == 2:
            self.write(lease, listing.VOID)
        return read(self, name, *arguments)

    monkeypatch.setattr(Bucket, "read", closing)
    save(on_s3, 2)
    assert_newest_good(Store(str(on_s3)), 2)


@pytest.mark.parametrize("when", ["before", "while it writes"])
def test_a_writer_that_was_taken_over_commits_nothing_more(on_s3, impatient, monkeypatch, when):
    store = save(on_s3, 1)
    with store.open_for_writing() as writer:
        writer.write(snapshot(2))
        if when == "before":
            leave_writer(on_s3)
        else:
            before_commit(monkeypatch, writer, lambda: leave_writer(on_s3))
        with pytest.raises(WriterConflict, match="on elsewhere has taken over"):
            writer.write(snapshot(3))
        with pytest.raises(WriterConflict, match="on elsewhere has taken over"):
            writer.write(snapshot(4))
    assert [info.step for info in store.steps()] == [1, 2]
    save(on_s3)
    assert leftovers(on_s3) == []


@pytest.fixture
def numbers(request):
    """The numbers of requests at which something happens."""
    return itertools.count(1, 1 if request.config.getoption("--long") else 3)


def in_memory():
    """Return a URL of an empty store in memory, and empty all others: a listing reads them all."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return f"memory://{secrets.token_hex(4)}/run"


@contextlib.contextmanager
def before_requests(act):
    """Call `act(number, method, arguments)` before each request, except those of `act`."""
    call = Bucket._call
    numbers = itertools.count(1)
    within = []

    def acting(self, method, *arguments, **keywords):
        if not within:
            within.append(method)
            try:
                act(next(numbers), method, arguments)
            finally:
                within.clear()
        return call(self, method, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "_call", acting)
        yield


def take_over(place, *steps):
    """Save in this process, as if the writer that is open in it were dead."""
    writing._held.clear()
    return save(place, *steps, keep_last=2)


def replace_writer(place, beats, number):
    """Replace a writer before a request of a save. Return whether there was such a request."""
    save(place, 1, 2, keep_last=2)
    said = ""
    replaced = []
    with Store(place, keep_last=2).open_for_writing() as writer:
        own = writer._writer

        def act(request, *_):
            if request == number:
                replaced.append(request)
                take_over(place, 4)
                if beats:
                    lease = f"writers/{own._number:09d}.json"
                    Bucket(place, {}).write(lease, own._lease.to_bytes(9))

        with before_requests(act):
            try:
                writer.write(snapshot(3))
            except CheckpointError as error:
                said = str(error)
        if not replaced:
            return False
        with pytest.raises(WriterConflict):
            writer.write(snapshot(5))
    store = Store(place)
    steps = [info.step for info in store.steps()]
    assert steps[-1] == 4
    # The step was committed before the request.
    assert said or 3 in steps or steps == [4]
    for entry in store.entries():
        assert store.verify_entry(entry) == []
    save(place)
    assert leftovers(path_of(place)) == []
    return True


@pytest.mark.parametrize("beats", [False, True], ids=["silent", "beats"])
def test_a_writer_may_be_replaced_at_any_request(beats, numbers):
    assert next(n for n in numbers if not replace_writer(in_memory(), beats, n)) > 20


def commit_late(place, by, number):
    """Deliver a lost commit before a request of the next save, of the same or the next writer.

    Returns:
        Whether there was such a request.
    """
    save(place, 1, 2, keep_last=None)
    late, arrived, problems = [], [], []

    def lose(request, method, arguments):
        if method == "pipe_file" and arguments[0].endswith(listing.COMMITTED):
            late.append(arguments)
            raise PermissionError

    def arrive(request, *_):
        if request == number:
            arrived.append(request)
            with contextlib.suppress(FileExistsError):
                fsspec.filesystem("memory").pipe_file(*late[0], mode="create")
        if arrived:
            problems.extend(entry.error for entry in Store(place).entries() if entry.error)

    with Store(place).open_for_writing() as writer:
        if by == "next":
            # As if the process ended.
            writer._writer.discard = lambda draft: None
        with before_requests(lose), pytest.raises(CheckpointError):
            writer.write(snapshot(3))
        with before_requests(arrive):
            if by == "same":
                writer.write(snapshot(4))
            else:
                take_over(place, 4)
    assert problems == []
    assert_newest_good(Store(place), 4)
    save(place)
    assert leftovers(path_of(place)) == []
    return bool(arrived)


@pytest.mark.parametrize("by", ["same", "next"])
def test_a_commit_may_arrive_at_any_request_of_the_next_save(by, numbers):
    """Its step is complete, or does not exist."""
    assert next(n for n in numbers if not commit_late(in_memory(), by, n)) > 20


def test_a_step_that_arrives_after_the_next_save_is_not_the_newest():
    place = in_memory()
    late = {}

    def lose(request, method, arguments):
        if method == "pipe_file" and arguments[0].endswith(listing.COMMITTED):
            memory = fsspec.filesystem("memory")
            late.update({path: memory.cat_file(path) for path in memory.find(arguments[0][:-15])})
            late[arguments[0]] = arguments[1]
            raise PermissionError

    save(place, 1, 2)
    with Store(place).open_for_writing() as writer:
        for _ in range(5):
            late.clear()
            with before_requests(lose), pytest.raises(CheckpointError):
                writer.write(snapshot(3))
        take_over(place, 4)
        for path, content in late.items():
            fsspec.filesystem("memory").pipe_file(path, content)
    assert {3, 4} <= {info.step for info in Store(place, keep_last=None).steps()}
    assert_newest_good(Store(place), 4)


def test_two_writers_that_take_over_at_once(on_s3, impatient, monkeypatch):
    """Both find the old writer dead. Only one of them can create the next record."""
    save(on_s3, 1)
    leave_writer(on_s3)
    wait = writing.wait_for_death
    first = []

    def meanwhile(*arguments):
        wait(*arguments)
        if not first:
            first.append(leave_writer(on_s3))

    monkeypatch.setattr(writing, "wait_for_death", meanwhile)
    with Store(str(on_s3)).open_for_writing() as writer:
        # The first of the two wrote no more heartbeats, so this writer has replaced it.
        writer.write(snapshot(2))
    assert first
    assert_newest_good(Store(str(on_s3)), 2)


def test_the_only_step_is_replaced_while_it_is_listed(on_s3, monkeypatch):
    store = save(on_s3, 1, keep_last=1)
    scan = listing.scan
    done = []

    def slow(*arguments):
        if not done:
            done.append(arguments)
            save(on_s3, 2, keep_last=1)
        return scan(*arguments)

    monkeypatch.setattr(listing, "scan", slow)
    assert_newest_good(store, 2)


def test_a_missing_bucket_is_not_an_empty_store(on_s3):
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        Store("s3://no-such-bucket/run").newest_good()


def test_slashes_in_a_url(on_s3):
    place = str(on_s3).replace(s3_server.BUCKET, s3_server.BUCKET + "/", 1) + "//"
    store = save(place, 1, 2, 3, keep_last=1)
    assert store.location == str(on_s3)
    assert len(names(on_s3)) == 1


def test_a_name_with_characters_of_patterns(on_s3):
    one, other = on_s3 / "lr=1", on_s3 / "lr=[1]"
    save(one, 1, 2, keep_last=1)
    for step in (3, 4):
        save(other, step, keep_last=1)
    assert len(names(one)) == len(names(other)) == 1
    assert_newest_good(Store(str(one)), 2)
    assert_newest_good(Store(str(other)), 4)


def test_objects_that_could_not_be_deleted_are_deleted_later(on_s3, quick, monkeypatch, caplog):
    call = Bucket._call
    allowed = []

    def refuse(self, method, *arguments, **keywords):
        if method == "rm_file" and not allowed:
            raise PermissionError("Access Denied")
        return call(self, method, *arguments, **keywords)

    monkeypatch.setattr(Bucket, "_call", refuse)
    with Store(str(on_s3), keep_last=1).open_for_writing() as writer:
        for step in (1, 2):
            writer.write(snapshot(step))
        assert "was not deleted yet" in caplog.text
        assert len(list((on_s3 / "steps").iterdir())) == 2
        allowed.append(True)
        writer.write(snapshot(3))
    # The next writer deletes the object of the check for conditional writes.
    assert all("probe" in name for name in leftovers(on_s3))
    with Store(str(on_s3), keep_last=1).open_for_writing():
        pass
    assert leftovers(on_s3) == []


def test_heartbeats_are_written(on_s3, impatient):
    there = Bucket(str(on_s3), {})
    with Store(str(on_s3)).open_for_writing():
        (lease,) = there.sizes("writers")
        deadline = time.monotonic() + 30
        seen = set()
        while len(seen) < 3:
            seen.add(there.read(lease, 10_000))
            assert time.monotonic() < deadline
    # The next writer need not wait.
    assert there.read(lease, 10_000) == listing.VOID


def of_an_earlier_version():
    """Return a store whose log lists steps 2 and 3. Its writer was killed before it committed 4."""
    place = in_memory()
    recorded = Path(__file__).with_name("earlier")
    for file in recorded.glob("**/*.*"):
        Bucket(place, {}).write(str(file.relative_to(recorded)), file.read_bytes())
    return place


def test_a_store_of_an_earlier_version_is_read():
    place = of_an_earlier_version()
    before = objects_of(place)
    store = Store(place)
    assert [info.step for info in store.steps()] == [2, 3]
    assert_newest_good(store, 3)
    assert objects_of(place) == before


def convert(number):
    """Let request `number` of the first writer fail. Return whether there was such a request."""
    place = of_an_earlier_version()
    failed, seen = [], []

    def fail(request, *_):
        if request >= number:
            seen.append([info.step for info in Store(place).steps()])
        if request == number:
            failed.append(request)
            raise PermissionError

    with before_requests(fail), contextlib.suppress(CheckpointError):
        Store(place).open_for_writing().close()
    assert all(steps == [2, 3] for steps in seen)
    save(place, 4)
    store = Store(place)
    assert [info.step for info in store.steps()] == [2, 3, 4]
    assert_newest_good(store, 4)
    save(place)
    assert leftovers(path_of(place)) == []
    return bool(failed)


def test_a_store_of_an_earlier_version_is_converted(impatient, numbers):
    assert next(n for n in numbers if not convert(n)) > 20


@pytest.mark.parametrize("content", [b"{}", b" " * 90_000_000], ids=["damaged", "large"])
def test_a_damaged_log_of_an_earlier_version(content, caplog):
    place = of_an_earlier_version()
    there = Bucket(place, {})
    last = max(there.sizes("log"))
    there.write(last, content)
    before = there.sizes()
    tracemalloc.start()
    try:
        assert [info.step for info in Store(place).steps()] == [2, 3]
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert "the newest record in the log of" in caplog.text
    with pytest.raises(CheckpointError, match="To use the record before it, delete the damaged"):
        Store(place).open_for_writing()
    there.delete([last])
    for name in there.sizes("log"):
        there.write(name, content)
    with pytest.raises(CheckpointError, match="all records in the log of .* are damaged"):
        Store(place).newest_good()
    there.delete(list(there.sizes("log")))
    with pytest.raises(CheckpointError, match="has 3 steps of an earlier version of hvdkit, but"):
        Store(place).open_for_writing()
    assert there.sizes("steps").items() <= before.items()
    assert len(there.sizes("steps")) == 15
