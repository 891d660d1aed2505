"""Faults of servers and networks: no good step is lost, and all listed steps are good."""

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

import numpy as np
import pytest
import s3fs

from hvdkit.checkpoint.errors import CheckpointError, Damaged, WriterConflict
from hvdkit.checkpoint.lease import Lease
from hvdkit.checkpoint.objects import bucket, files, listing, log, writing
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.store import Store
from hvdkit.checkpoint.writing import EncodedPart
from tests.checkpoint import s3_server
from tests.checkpoint.material import (
    assert_newest_good,
    before_commit,
    leftovers,
    names,
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
    assert any("/log/" in change for change in killer.changes)
    assert spared > 10


def test_outdated_listings(on_s3, s3_proxy):
    store = through(s3_proxy, on_s3, keep_last=None)
    s3_proxy.act = lambda number, method, path: "stale" if "list-type" in path else None
    with store.open_for_writing() as writer:
        for step in (1, 2, 3):
            writer.write(snapshot(step))
            assert_newest_good(store, step)
    assert [info.step for info in store.steps()] == [1, 2, 3]
    with store.open_for_writing() as writer:
        writer.write(snapshot(4))
    assert_newest_good(store, 4)


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
        # Neither a record of the log nor the object of the check is left.
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
    """The log needs this if several writers create the next record at the same time.

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


def test_a_damaged_listing(on_s3, caplog):
    store = save(on_s3, 1, 2, keep_last=None)
    # The last record closes the writer.
    *_, newest, last = sorted((on_s3 / "log").iterdir(), key=lambda path: path.name)
    last.unlink()
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(bytes(content))
    # Only the damaged record lists step 2. The files of step 2 stay.
    assert_newest_good(store, 1)
    assert "the newest record in the log of" in caplog.text
    save(on_s3, 3, keep_last=None)
    assert [info.step for info in store.steps()] == [1, 2, 3]
    assert leftovers(on_s3) == []


def test_a_deleted_log_deletes_no_steps(on_s3):
    save(on_s3, 1, 2)
    for record in (on_s3 / "log").iterdir():
        record.unlink()
    with pytest.raises(CheckpointError, match="has 2 steps, but its log/ is empty or was deleted"):
        Store(str(on_s3)).open_for_writing()
    assert len(list((on_s3 / "steps").iterdir())) == 2


def test_old_records_are_deleted(on_s3, monkeypatch):
    monkeypatch.setattr(log, "KEPT_RECORDS", 3)
    store = save(on_s3, *range(1, 8), keep_last=2)
    save(on_s3, 8)
    assert_newest_good(store, 8)
    assert 3 <= len(list((on_s3 / "log").iterdir())) <= 6


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


def leave_writer(place, **changes):
    """Append a record of a writer on another host, and write one heartbeat."""
    there = Bucket(str(place), {})
    lease = dataclasses.replace(Lease.own(), host="elsewhere", machine="another", **changes)
    there.write(f"writers/{lease.token}.json", lease.to_bytes(0))
    head = log.read_head(there)
    assert log.append(there, log.Record(head.number + 1, lease, head.steps))
    return there, lease


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


def test_a_writer_on_another_host_with_heartbeats(on_s3, impatient, monkeypatch):
    there, lease = leave_writer(on_s3)
    beats = iter(range(1, 1000))
    read = Bucket.read

    def beating(self, name, *arguments):
        if name == f"writers/{lease.token}.json":
            there.write(name, lease.to_bytes(next(beats)))
        return read(self, name, *arguments)

    monkeypatch.setattr(Bucket, "read", beating)
    with pytest.raises(WriterConflict, match="on elsewhere is writing"):
        Store(str(on_s3)).open_for_writing()


def test_a_writer_on_another_host_that_closes_while_the_next_one_waits(
    on_s3, impatient, monkeypatch
):
    save(on_s3, 1)
    there, lease = leave_writer(on_s3)
    heartbeat = f"writers/{lease.token}.json"
    read = Bucket.read
    reads = itertools.count()

    def closing(self, name, *arguments):
        if name == heartbeat and next(reads) == 1:
            head = log.read_head(there)
            assert log.append(there, log.Record(head.number + 1, lease, head.steps, is_open=False))
            there.delete([heartbeat])
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
    assert len(list((on_s3 / "steps").iterdir())) == 2


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


def test_a_writer_that_was_replaced_long_ago(on_s3, impatient, monkeypatch):
    """The record with the replaced writer's next number has been deleted."""
    monkeypatch.setattr(log, "KEPT_RECORDS", 3)
    store = save(on_s3, 1)
    with store.open_for_writing() as writer:
        writer.write(snapshot(2))
        there, lease = leave_writer(on_s3)
        head = log.read_head(there)
        for number in range(head.number + 1, head.number + 8):
            assert log.append(there, log.Record(number, lease, head.steps))
        log.trim(there, number)
        with pytest.raises(WriterConflict, match="has taken over"):
            writer.write(snapshot(3))
        monkeypatch.setattr(writing.ObjectWriter, "check", lambda self: None)
        with pytest.raises(WriterConflict, match="has taken over"):
            writer.write(snapshot(4))
    assert [info.step for info in store.steps()] == [1, 2]
    assert log.read_head(there).number == number


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


@pytest.mark.parametrize("what", ["bucket", "steps"])
def test_missing_objects_are_not_an_empty_store(on_s3, what):
    """The bucket is missing, or steps were deleted by hand and the log was not."""
    url = "s3://no-such-bucket/run"
    if what == "steps":
        url = str(on_s3)
        save(on_s3, 1, 2)
        for file in (on_s3 / "steps").glob("*/*"):
            file.unlink()
    with pytest.raises(CheckpointError, match="lists 2 steps|bucket does not exist"):
        Store(url).newest_good()


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


def test_heartbeats_are_written_and_deleted(on_s3, impatient):
    there = Bucket(str(on_s3), {})
    with Store(str(on_s3)).open_for_writing():
        deadline = time.monotonic() + 30
        while not (signs := list(there.sizes("writers"))):
            assert time.monotonic() < deadline
        (sign,) = signs
        seen = set()
        while len(seen) < 3:
            seen.add(there.read(sign, 10_000))
    assert there.sizes("writers") == {}


def test_a_record_of_the_log_that_would_fill_the_memory_is_not_read(caplog):
    store = bucket.Bucket(f"memory://{secrets.token_hex(4)}/run", {})
    assert log.append(store, log.Record(1, Lease.own(), (log.Listed("step-1", 1, 1),)))
    store.write(log.name_of(2), b" " * 90_000_000)
    tracemalloc.start()
    try:
        head = log.read_head(store)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert (head.number, head.steps) == (2, (log.Listed("step-1", 1, 1),))
    assert "it has 90000000 bytes; expected at most 16000000" in caplog.text
    with pytest.raises(Damaged, match="90000000 bytes"):
        log.read(store, 2)


@pytest.mark.parametrize("number", [10**20 - 1, 10**18, 10**18 - 1, 5000])
@pytest.mark.parametrize("kind", ["garbage", "a copy"])
def test_an_object_of_others_in_the_log_does_not_stop_saving(number, kind):
    place = f"memory://{secrets.token_hex(4)}/run"
    save(place, 1)
    there = bucket.Bucket(place, {})
    end = log.read_head(there)
    content = b"{}" if kind == "garbage" else there.read(log.name_of(end.number), 10_000)
    there.write(f"log/{number:020d}.json", content)
    assert log.read_head(there).number == end.number
    store = save(place, 2)
    save(place, 3)
    assert [info.step for info in store.steps()] == [1, 2, 3]
    assert_newest_good(store, 3)
