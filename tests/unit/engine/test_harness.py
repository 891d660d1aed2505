"""Faults of the engine's headers between real processes, see harness.cc."""

import contextlib
import json
import os
import resource
import signal
import subprocess

import pytest


@pytest.fixture(scope="session")
def harness(build_driver):
    return build_driver("harness")


@pytest.fixture(scope="session")
def checked(build_driver):
    """The harness with checks of addresses and undefined behaviour."""
    return build_driver(
        "harness", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    )


def run(harness, *arguments, seconds=60, **env):
    """Return the harness's output and status."""
    with subprocess.Popen(
        [harness, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | env,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0], process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, after a timeout


def test_more_ranks_than_files_that_may_be_sent_at_once(harness):
    """Files that are being sent count for all processes of the user together, and the soft limit of
    open files holds for them. root has no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 2000:
        pytest.skip(f"the hard limit of open files is {hard}")
    assert run(harness, "peers", 24, 128, 2000, 0) == ("", 0)


def test_silent_connections_of_strangers_do_not_keep_ranks_from_sharing_memory(harness):
    assert run(harness, "peers", 3, 512, 1024, 100) == ("", 0)


def test_a_rank_that_continues_after_the_error_changes_no_memory_of_others(harness):
    assert run(harness, "stops") == ("", 0)


def test_a_killed_rank_is_named_by_all_others(harness):
    assert run(harness, "ends", 4) == ("", 0)


def test_large_memory_is_allocated_while_signals_interrupt_large_requests(harness):
    assert run(harness, "reserve") == ("", 0)


def check_record(harness, folder):
    assert run(harness, "record", folder) == ("", 0)
    record = json.loads((folder / "rank-0.json").read_text())
    assert (record["reason"], record["failed"]) == ("error", "failing")
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "request"]


def test_a_record_of_an_error_stays_while_an_older_one_is_written(harness, tmp_path):
    check_record(harness, tmp_path)


@pytest.mark.long
def test_the_same_with_sanitizers(checked, tmp_path):
    for arguments in [
        # A process has less than 1,024 files, so at most 10 ranks can have 100 strangers each.
        *[("peers", 24, 128, 2000, 0), ("peers", 3, 512, 1024, 100)],
        *[("ends", 40), ("reserve",)],
    ]:
        assert run(checked, *arguments, seconds=200) == ("", 0), arguments
    for _ in range(10):
        assert run(checked, "stops") == ("", 0)
    check_record(checked, tmp_path)


@pytest.mark.long
def test_threads_do_not_race(build_driver, tmp_path):
    raced = build_driver("harness", "-g", "-fsanitize=thread")
    assert run(raced, "threads", tmp_path, 5, seconds=120) == ("", 0)
