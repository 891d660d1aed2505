"""The outcome of real jobs, computed again from the events in their output folders."""

from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.launch.ending import events
from hvdkit.launch.ending.outcome import outcome

FOLDER = Path(__file__).parent / "recorded"
#: The file -> the exit status, the suspects, and the beginning of the report.
RECORDED = {
    # The rank that raised ends last, because a thread runs. Another one hides that it lost a rank.
    "lost-peers-end-first.jsonl": (1, (1,), "rank 1 on localhost failed: exit status 1; 2 ranks"),
    # The other rank leaves by `os._exit`. The launcher ends the rank that raised.
    "raised-but-a-thread-runs.jsonl": (1, (1,), "rank 1 on localhost failed: it raised an error"),
    "killed-agent.jsonl": (1, (), "lost localhost: its agent was killed by signal 9 (Killed)"),
    # Rank 1 calls a collective that no other rank calls.
    "deadlock.jsonl": (1, (), "Ranks 0, 2 have waited 3 s for the allreduce 'loss', 12 bytes of"),
    # A power cut. MPI ends another rank first, which waits in MPI_Init and has no report.
    "host-lost-in-mpi-init.jsonl": (1, (), "lost host1: the host does not answer"),
    "crash.jsonl": (139, (0,), "rank 0 on localhost failed: killed by signal 11"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_job(name):
    status, suspects, report = RECORDED[name]
    found = outcome(*events.parse((FOLDER / name).read_text()))
    assert (found.status, found.suspects) == (status, suspects)
    assert found.report.startswith(report)


def test_a_lost_host_that_is_noticed_after_the_launcher_has_begun_to_end_the_ranks():
    """On a busy host, the launcher gives up waiting for reports before it notices the loss."""
    plan, found = events.parse((FOLDER / "host-lost-in-mpi-init.jsonl").read_text())
    early = [replace(x, at=1339.0) if isinstance(x, events.EndBegan) else x for x in found]
    assert outcome(plan, early).report.startswith("lost host1: the host does not answer")


def test_each_recorded_job_has_an_expected_outcome():
    assert {path.name for path in FOLDER.iterdir()} == set(RECORDED)


@pytest.mark.parametrize("status", [-(1 << 63) - 1, -65, 1 << 40])
def test_a_status_that_no_process_has(status):
    text = (FOLDER / "crash.jsonl").read_text()
    with pytest.raises(HvdkitError, match=f"Ended: status is {status}"):
        events.parse(text.replace('"hint": ""', f'"hint": "", "status": {status}', 1))
