"""Random sequences of jobs in one place. Some are killed, or out of space, at a random call.

A job restores the newest step or a given step, saves steps, and ends. After each job, the newest
good step must be the step that was saved last, or to which a job went back. If a job was killed,
it may be the step before. All listed steps must be good, and no job may delete steps of older runs.
"""

import dataclasses
import errno
import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.checkpoint.background import BackgroundWriter
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.pruning import of_older_runs, prunable
from hvdkit.checkpoint.retention import Retention
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from tests.searching import search_settings
from tests.unit.checkpoint.material import leftovers, snapshot

_STEPS = st.integers(1, 8)
_RESTORE = st.tuples(st.just("restore"), st.none() | _STEPS)
_ACTION = st.one_of(
    _RESTORE, st.tuples(st.just("save"), st.integers(0, 2)), st.tuples(st.just("open"), st.none())
)
_JOB = st.fixed_dictionaries(
    {
        "keep_last": st.sampled_from([1, 2, 3, None]),
        "overwrite": st.sampled_from([False, False, False, True]),
        "actions": st.builds(lambda first, others: [first, *others], _RESTORE, st.lists(_ACTION)),
        # Numbers of system calls or requests; most jobs have fewer than 200.
        "killed_at": st.none() | st.integers(1, 200),
        "full_at": st.none() | st.none() | st.integers(1, 200),
        "pruned": st.none() | st.none() | st.tuples(st.integers(1, 2), st.booleans()),
    }
)


def interrupt(job):
    """Kill this process at a file operation or a request, or make one fail."""
    calls = itertools.count(1)

    def before(*_):
        call = next(calls)
        if call == job["killed_at"]:
            os._exit(9)
        if call == job["full_at"]:
            # An error that neither the system nor the object store's client repeats.
            raise PermissionError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    request = Bucket._call

    def after_before(self, *arguments, **keywords):
        before()
        return request(self, *arguments, **keywords)

    disk.before_step = before
    Bucket._call = after_before


def work(place, job, number, say):
    """Execute a job's actions. Called in a new process."""
    interrupt(job)
    store = Store(str(place), keep_last=job["keep_last"])
    writer = BackgroundWriter(store, job["overwrite"])
    step = 0
    for k, (action, argument) in enumerate(job["actions"]):
        try:
            if action == "restore":
                opened = store.newest_good(argument)
                if opened is None:
                    continue
                with opened:
                    writer.restored(opened.manifest)
                    step = opened.manifest.step
                    say("restored", argument, opened.manifest.metrics["id"])
            elif action == "open":
                writer.open()
            else:
                writer.open()
                step += argument
                own = 1000 * number + k
                say("saving", None, own)
                writer.begin(dataclasses.replace(snapshot(step), metrics={"id": own}))
                assert writer.finished(60)
                say("saved", None, own)
        except (UsageError, CheckpointError):
            # The step is missing, steps exist and none was restored, or there is no space.
            continue
    writer.close()


def run(place, job, number, log):
    """Run a job in a new process, and return its messages."""
    descriptor = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def say(*words):
        os.write(descriptor, (json.dumps(words) + "\n").encode())

    pid = os.fork()
    if pid == 0:
        try:
            work(place, job, number, say)
            os._exit(0)
        except BaseException as error:
            say("raised", None, repr(error))
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    os.close(descriptor)
    return [json.loads(line) for line in log.read_text().splitlines()]


def newest_of(store):
    opened = store.newest_good()
    if opened is None:
        return None
    with opened:
        return opened.manifest.metrics["id"]


def check(place, jobs, log):
    newest = None
    store = Store(str(place))
    for number, job in enumerate(jobs, 1):
        may_be = {newest}
        older = {entry.name for entry in of_older_runs(store)}
        for word, asked, own in run(place, job, number, log):
            assert word != "raised", own
            if word == "restored":
                assert asked is not None or own in may_be, "restore() gave one that is not newest"
                may_be.add(own)
            elif word == "saving":
                may_be.add(own)
            else:
                may_be = {own}
        newest = newest_of(store)
        assert newest in may_be
        assert older <= {entry.name for entry in store.entries()}, "another run's were deleted"
        for entry in store.entries():
            assert store.verify_entry(entry) == []
        commits = [info.manifest.commit for info in store.steps()]
        assert len(set(commits)) == len(commits)
        if job["pruned"] is not None and newest is not None:
            count, older_runs = job["pruned"]
            with store.open_for_writing() as writer:
                writer.prune([e.name for e in prunable(store, Retention(count), older_runs)])
            assert newest_of(store) == newest
    with store.open_for_writing():
        pass
    assert leftovers(place) == []


@pytest.mark.long_with("s3")
def test_sequences_of_jobs(tmp_path, place, request):
    long = request.config.getoption("--long")
    in_a_folder = isinstance(place, Path)
    examples = (1500 if long else 25) if in_a_folder else 100
    numbers = itertools.count()

    @search_settings(examples)
    @given(st.lists(_JOB, min_size=2, max_size=8))
    def search(jobs):
        check(place / str(next(numbers)), jobs, tmp_path / "log")

    search()
