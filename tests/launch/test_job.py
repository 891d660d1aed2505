"""The outcome of a job, from the messages of simulated agents in a given order."""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

from hvdkit.launch.connection import Event
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.launch.output import Output
from hvdkit.launch.plan import make_plan
from hvdkit.launch.reachability import BrokenConnection
from hvdkit.launch.timeouts import Timeouts
from tests.launch.test_stalls import record

#: The plan of each job here.
PLAN = make_plan(["true"], "/", [Host("host0", 1), Host("host1", 1)], 2)
#: An event: the launcher ends the ranks.
END = "end"
#: Two presses of Ctrl-C, with the seconds between them.
TWICE = (signal.SIGINT, 1.0, signal.SIGINT)


class Agent:
    """An agent without a process."""

    idle = ending = False
    silent_since = float("inf")

    def __init__(self, host):
        self.host = host
        self.asked = 0

    def send(self, kind, **fields):
        self.asked += 1
        self.ending = self.ending or kind == "end"

    def lost_host(self):
        return False

    def silence(self, now):
        pass

    def explain(self):
        return "the connection to its agent has ended"


@pytest.fixture
def outcome(monkeypatch):
    """Return a function that returns the outcome of a job of two ranks, one on each host.

    Its events are messages with the number of an agent, signals, seconds that pass, or `END`.
    """
    passed = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed)

    def run(
        *events,
        registered=lambda: {0, 1},
        say=print,
        stdout_closed=False,
        aborted="",
        elastic=False,
        **timeouts,
    ):
        agents = [Agent(host) for host in PLAN.hosts]
        left = list(events)
        began = monotonic()

        def next_event(_):
            nonlocal passed
            if not left or (left[0] == END and not agents[0].ending):
                assert monotonic() < began + 20, "the job does not end"
                return None
            event = left.pop(0)
            if isinstance(event, tuple):
                return Event(agents[event[0]], event[1], time.monotonic())
            if isinstance(event, signal.Signals):
                signal.raise_signal(event)
                return None
            passed += 0.0 if event == END else event
            return None

        pool = SimpleNamespace(
            connections=agents,
            next_event=next_event,
            killed=lambda: "",
            aborted=lambda: aborted,
        )
        with Output(2, None, None, say=print, progress=False) as output:
            output.stdout_closed = stdout_closed
            found = Job(PLAN, pool, output, Timeouts(**timeouts), registered, say, elastic).run()
        run.explained = pool.explained
        run.ended_ranks = agents[0].ending
        return found

    return run


def init(rank, connected=False, start=1):
    state = {"start": start, "connected": connected, "leaving": False}
    return rank, {"kind": "init", "rank": rank, **state}


def ended(rank, status=0):
    return rank, {"kind": "ended", "rank": rank, "status": status}


def script(rank, status):
    """Return the message that a script has ended; with None, that the rank continues."""
    return rank, {"kind": "script", "rank": rank, "status": status}


#: The last messages of both agents.
DONE = (0, {"kind": "done"}), (1, {"kind": "done"})
LOST = (0, {"kind": "lost"}), (1, {"kind": "lost"})


def test_a_lost_agent_is_the_cause_of_sigterm(outcome):
    """If an agent of mpirun dies, mpirun ends the other ranks, which may be reported first."""
    found = outcome(
        ended(0, -signal.SIGTERM),
        (1, {"kind": "lost"}),
        (0, {"kind": "done"}),
    )
    assert found.status == 1
    assert found.report.startswith("lost host1: the connection to its agent has ended")
    assert found.report.endswith("SIGTERM then ended rank 0 on host0.")
    assert found.failure is None


def test_a_lost_host_is_named_although_mpirun_has_ended_another_agent_before(outcome, monkeypatch):
    monkeypatch.setattr(Agent, "lost_host", lambda agent: agent.host.name == "host1")
    found = outcome((0, {"kind": "lost"}), (1, {"kind": "lost"}), registered=None)
    assert found.report.startswith("lost host1:")


def test_a_rank_that_fails_before_an_agent_is_lost_is_the_cause(outcome):
    found = outcome(
        ended(0, 3),
        (1, {"kind": "lost"}),
        (0, {"kind": "done"}),
    )
    assert found.status == 3
    assert found.report.startswith("rank 0 on host0 failed: exit status 3")


@pytest.mark.parametrize("stop", [False, True], ids=["failure", "stop signal"])
def test_after_a_slow_write_the_messages_that_have_arrived_are_read_before_a_deadline(
    outcome, stop
):
    """For example, the reader of the output was stopped for 200 s."""
    first = [signal.SIGTERM] if stop else [(1, {"kind": "failed", "reason": "no memory"}), END]
    found = outcome(*first, 200, ended(0, 75), ended(1, 75), *DONE)
    assert "did not" not in found.report
    assert found.status == (75 if stop else 1)


def failed(agent, reason="processes [7] did not end"):
    return agent, {"kind": "failed", "reason": reason}


@pytest.mark.parametrize(
    ("events", "status", "report"),
    [
        ((DONE[1], END, ended(0), DONE[0]), 1, "host1: its agent got SIGTERM or SIGHUP before it"),
        ((ended(0), *DONE), 1, "host1: its agent got SIGTERM or SIGHUP before it started rank 1"),
        ((*TWICE, ended(0), DONE[0], (1, {"kind": "lost"})), 130, "ended by SIGINT"),
        ((*[signal.SIGTERM] * 2, *DONE), 143, "ended by SIGTERM"),
        (
            (*TWICE, ended(0), DONE[0], failed(1), (1, {"kind": "lost"})),
            130,
            "ended by SIGINT\nhost1: processes [7] did not end",
        ),
    ],
    ids=["before others", "after others", "lost", "stopped", "failed"],
)
def test_a_job_without_the_status_of_a_rank_has_not_succeeded(outcome, events, status, report):
    found = outcome(*events)
    assert found.status == status
    assert found.report.startswith(report)


def test_a_process_that_does_not_end_is_reported_beside_the_failure(outcome):
    found = outcome(ended(0, 3), 3.0, END, failed(1), failed(1), DONE[0], (1, {"kind": "lost"}))
    assert found.status == 3
    assert found.report.startswith("rank 0 on host0 failed: exit status 3")
    assert found.report.count("host1: processes [7] did not end") == 1
    assert found.failing_host(PLAN) == "host0"


@pytest.mark.parametrize(
    ("event", "options", "host"),
    [
        (failed(1), {}, "host1"),
        (failed(1), {"registered": None}, "host1"),
        ((1, {"kind": "lost"}), {}, "host1"),
        # mpirun ends all agents after one of them.
        ((1, {"kind": "lost"}), {"registered": None}, None),
        (DONE[1], {}, "host1"),
    ],
)
def test_the_failure_of_an_agent_counts_for_its_host(outcome, event, options, host):
    found = outcome(event, (1, {"kind": "lost"}), END, ended(0, -15), DONE[0], **options)
    assert found.failing_host(PLAN) == host


def test_an_agent_that_ends_because_the_launcher_was_stopped_does_not_count(outcome):
    found = outcome(70.0, (1, {"kind": "lost"}), END, ended(0, -15), DONE[0])
    assert "this launcher did not run for 70 s" in found.report
    assert found.failing_host(PLAN) is None


@pytest.mark.parametrize(
    ("events", "status", "interrupted"),
    [
        # The other ranks have 0.5 s to 5 s to fail by themselves.
        ((ended(0, 3), signal.SIGTERM, ended(1, 75)), 3, signal.SIGTERM),
        ((ended(0, 3), signal.SIGTERM, ended(1, -15)), 3, signal.SIGTERM),
        ((ended(0, 3), 3.0, END, signal.SIGUSR1, ended(1, -9)), 3, signal.SIGUSR1),
        ((failed(0), signal.SIGTERM, ended(0, -9), ended(1, -9)), 1, signal.SIGTERM),
        # The answers to the signal: no restart would follow.
        ((signal.SIGTERM, ended(0, 3), 3.0, END, ended(1, -9)), 3, None),
        ((signal.SIGTERM, ended(0, -15), ended(1, -15)), 143, None),
        ((signal.SIGTERM, ended(0, 75), ended(1, 75)), 75, None),
        # A batch system that signals all processes.
        ((ended(0, -15), signal.SIGTERM, ended(1, -15)), 143, None),
    ],
)
def test_a_stop_signal_after_a_failure_prevents_the_restart(outcome, events, status, interrupted):
    found = outcome(*events, *DONE)
    assert (found.status, found.interrupted) == (status, interrupted)
    assert found.restartable == (interrupted is not None)


#: The seconds for an orderly stop, and more than these, but no pause of the launcher.
GRACE, LONGER = 2.0, 3.0
#: How ranks may be asked to stop, and the status if one of them does not stop in order.
STOPS = {
    "signal": ((signal.SIGTERM,), 143),
    "second signal": (TWICE, 130),
    "script": ((), 1),
}
#: How a rank may end then, and whether the job can be resumed if all others have saved.
ENDS = {
    "saved": ((ended(1, 75),), True),
    "success": ((ended(1),), True),
    "saved late": ((LONGER, END, ended(1, 75)), True),
    "killed": ((LONGER, END, ended(1, -9)), False),
    "killed after its script": ((script(1, 75), LONGER, END, ended(1, -9)), True),
    "killed after its script in a shell": ((script(1, 75), LONGER, END, ended(1, 143)), True),
    "crashed after its script": ((script(1, 75), ended(1, -6)), True),
    "crashed after its script in a shell": ((script(1, 75), ended(1, 139)), True),
    "killed after another script": (
        (script(1, 75), script(1, None), LONGER, END, ended(1, -9)),
        False,
    ),
    "failed after its script": ((script(1, 75), LONGER, END, ended(1, 3)), False),
    "failed late": ((LONGER, END, ended(1, 3)), False),
    "not ended": ((LONGER, END, failed(1)), False),
    "lost": (((1, {"kind": "lost"}), END), False),
}


@pytest.mark.parametrize("elastic", [False, True], ids=["", "elastic"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_is_resumable_only_if_no_rank_was_ended(outcome, stop, end, elastic):
    """Rank 0 has saved, and rank 1 ends in each way, before rank 0 or after it."""
    (signals, status), (events, resumable) = STOPS[stop], ENDS[end]
    orders = [(ended(0, 75), *events)]
    if signals:
        orders.append((*events, ended(0, 75)))
    for order in orders:
        found = outcome(*signals, *order, *DONE, stop=GRACE, elastic=elastic)
        assert found.status == (75 if resumable else status), order
        last = found.report.splitlines()[-1]
        assert last.startswith("stopped; start the job again") == resumable, order
        partial = "only rank 0 on host0 made an orderly stop (exit status 75)"
        assert (partial in found.report) == (not resumable), order
        assert (found.restartable, found.hosts_changed) == (False, False), order


@pytest.mark.parametrize(("seconds", "is_second"), [(0.0, False), (0.3, False), (0.6, True)])
def test_a_terminal_and_a_wrapper_may_both_send_ctrl_c(outcome, seconds, is_second):
    said = []
    presses = (signal.SIGINT, seconds, signal.SIGINT, seconds / 10, signal.SIGINT)
    found = outcome(*presses, ended(0, 75), ended(1, 75), *DONE, say=said.append)
    assert found.status == 75
    assert ("ending all ranks now" in said) == is_second


def test_further_signals_do_not_extend_the_time_for_the_end_of_the_ranks(outcome):
    """The agents do not answer, for example because their hosts hang."""
    again = (4.0, signal.SIGINT) * 5
    found = outcome(*TWICE, *again, ended(0, -9), ended(1, -9), *DONE)
    assert found.status == 130
    assert "host0, host1 did not confirm that its ranks have ended" in found.report


@pytest.mark.parametrize(
    ("events", "status", "restartable"),
    [
        ((ended(0, 75), ended(1, 3)), 3, False),
        ((ended(1, 3), ended(0, 75)), 3, True),
        ((signal.SIGTERM, ended(0, 75), ended(1, 3)), 3, False),
        ((signal.SIGTERM, ended(0, 75), ended(1, -15)), 143, False),
        # All have saved, although the launcher ends them because of a failure before.
        ((failed(0), ended(0, 75), ended(1, 75)), 1, True),
    ],
)
def test_a_rank_that_fails_beside_one_that_has_saved(outcome, events, status, restartable):
    found = outcome(*events, *DONE)
    assert (found.status, found.restartable) == (status, restartable)
    assert "start the job again" not in found.report


@pytest.mark.parametrize(
    ("events", "status", "hosts_changed"),
    [
        ((ended(0, 85), ended(1, 85)), 85, True),
        # The ranks start again without the rank that was ended.
        ((ended(0, 85), LONGER, END, ended(1, -9)), 85, True),
        ((ended(0, 85), ended(1, 75)), 75, False),
        ((ended(0, 85), ended(1, 3)), 3, False),
        ((script(0, 85), ended(0, -11), ended(1, 85)), 85, True),
    ],
)
def test_ranks_that_end_because_the_hosts_have_changed(outcome, events, status, hosts_changed):
    found = outcome(*events, *DONE, elastic=True, stop=GRACE)
    assert (found.status, found.hosts_changed) == (status, hosts_changed)


@pytest.mark.parametrize(
    ("events", "status", "report"),
    [
        ((script(0, 75), script(1, 75), LONGER, END), 75, "ranks 0 on host0, 1 on host1 had"),
        ((signal.SIGUSR1, script(0, 75), script(1, 75), LONGER, END), 75, "ranks 0 on host0, 1 on"),
        ((script(0, 85), script(1, 85), LONGER, END), 85, "ranks 0 on host0, 1 on host1 had"),
        # Rank 0 may still save.
        ((script(1, 85), LONGER, END), 85, "rank 0 on host0 did not stop within 2 s"),
        # Slurm ends the ranks before the launcher does.
        ((signal.SIGUSR1, script(0, 75), script(1, 75)), 75, "stopped"),
    ],
)
def test_scripts_that_end_although_their_processes_run(outcome, events, status, report):
    """For example, a thread that is not a daemon still runs."""
    killed = ended(0, -15), ended(1, -9)
    found = outcome(*events, *killed, *DONE, elastic=True, stop=GRACE)
    assert found.status == status
    assert found.report.startswith(report)
    assert ("had reached the end of the script" in found.report) == (END in events)
    assert (found.hosts_changed, found.restartable) == (status == 85, status == 85)


@pytest.mark.parametrize("status", [-6, 139])
def test_a_crash_after_the_end_of_the_script_is_reported_and_does_not_end_other_ranks(
    outcome, status
):
    """The other ranks may still save, or copy the checkpoint."""
    found = outcome(script(1, 75), ended(1, status), 1.0, 0.0, ended(0, 75), *DONE, stop=60.0)
    assert found.status == 75
    number = "6 (Aborted)" if status == -6 else "11 (Segmentation fault)"
    assert found.report.startswith(
        f"rank 1 on host1 had reached the end of the script, and was then killed by signal {number}"
    )
    assert not outcome.ended_ranks


def test_a_crash_without_a_note_of_the_script_is_a_failure(outcome):
    found = outcome(ended(0), ended(1, -6), *DONE)
    assert (found.status, found.restartable, found.suspects) == (134, True, (1,))


def signalled(agent, number=signal.SIGTERM):
    return agent, {"kind": "signalled", "number": number}


def reported(rank, error, kind="own", how="exception"):
    """Return the message that a rank has reported its end."""
    lines = [TRACEBACK, '  File "a.py", line 1', error] if how == "exception" else []
    content = {"how": how, "error": error, "kind": kind, "chained": False, "traceback": lines}
    return rank, {"kind": "report", "rank": rank, "age": 0.0, "report": content}


def printed(rank, text):
    return rank, {"kind": "output", "rank": rank, "stream": "stderr", "text": text}


TRACEBACK = "Traceback (most recent call last):"
#: Rank 1 raises an exception.
BAD = reported(1, "ValueError: bad")
LOST_PEER = "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down"


@pytest.mark.parametrize(
    ("events", "status", "report", "restartable", "host"),
    [
        ((ended(1, 75), ended(0, 75)), 75, "{}\nstopped; start the job", False, None),
        # The script does not handle the signal. The launcher then ends the other ranks.
        ((ended(1, -15), 1.0, END, ended(0, -15)), 143, "{}\nSIGTERM then", True, "host1"),
        ((ended(1, 143), 3.0, END, ended(0, -15)), 143, "{}\nSIGTERM then", True, "host1"),
        ((LONGER, END, ended(0, -15), ended(1, -9)), 1, "{}\nranks 0 on host0, 1", True, None),
        ((ended(0, 75), LONGER, END, ended(1, -9)), 1, "{}\nonly rank 0 on host0", False, None),
        (((1, {"kind": "lost"}), END, ended(0, -15)), 1, "{}\nlost host1: ", True, "host1"),
        ((ended(1, 3), 3.0, END, ended(0, -15)), 3, "rank 1 on host1 failed: ", True, "host1"),
        # The rank had raised an exception before its agent got the signal.
        ((BAD, ended(1, -15), 3.0, END, ended(0, -15)), 143, "rank 1 on", True, "host1"),
        # A batch system signals all processes.
        ((signal.SIGTERM, ended(1, -15), ended(0, -15)), 143, "ended by SIGTERM", False, None),
    ],
)
def test_an_agent_that_gets_sigterm(outcome, events, status, report, restartable, host):
    said = []
    found = outcome(signalled(1), *events, *DONE, stop=GRACE, say=said.append)
    named = "the agent on host1 got SIGTERM"
    assert said[0] == f"{named}: asking its ranks to stop"
    assert (found.status, found.restartable) == (status, restartable)
    assert found.report.startswith(report.format(named))
    assert (named in found.report) == (signal.SIGTERM not in events)
    assert found.failing_host(PLAN) == host


def test_agents_that_get_signals_are_named(outcome):
    agents = signalled(0), signalled(1, signal.SIGHUP), signalled(1)
    said = []
    found = outcome(*agents, ended(0, 75), ended(1, 75), *DONE, say=said.append)
    assert found.report.startswith("the agents on host0, host1 got SIGTERM\nstopped; start")
    assert said == ["the agent on host0 got SIGTERM: asking its ranks to stop"]


def test_mpirun_sends_sigterm_to_all_agents_if_it_loses_one(outcome):
    said = []
    events = signalled(0), (1, {"kind": "lost"}), END, ended(0, -15), DONE[0]
    found = outcome(*events, registered=None, say=said.append)
    assert found.report.startswith("lost host1: ")
    assert said == []


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_a_process_counts_more_than_that_of_its_script(outcome, status):
    """The script has caught the exception with which it would have ended."""
    found = outcome(script(0, 75), script(1, 75), ended(0, status), ended(1, status), *DONE)
    assert found.status == status


def test_slurm_ends_the_job_step_while_other_ranks_save(outcome):
    found = outcome(ended(0, 75), *LOST, aborted="srun", registered=None)
    assert (found.status, found.restartable) == (1, False)
    assert found.report.splitlines()[0].startswith("only rank 0 on host0 made an orderly stop")
    assert "srun has ended all ranks of the job step" in found.report


def exited(rank, status):
    return rank, {"kind": "exited", "rank": rank, "status": status}


def test_a_host_is_lost_before_the_output_of_a_rank_that_failed_because_of_it(outcome, monkeypatch):
    monkeypatch.setattr(Agent, "lost_host", lambda agent: agent.host.name == "host1")
    lost, peer = (1, {"kind": "lost"}), reported(0, LOST_PEER, "peer")
    for order in ((peer, exited(0, 1), lost, ended(0, 1)), (peer, ended(0, 1), lost)):
        found = outcome(*order, (0, {"kind": "done"}))
        assert found.report.startswith("lost host1:")
        assert (found.suspects, found.lost, found.restartable) == ((), ("host1",), True)


@pytest.mark.parametrize(
    "events",
    [
        ((1, {"kind": "lost"}), ended(0), DONE[0]),
        (ended(0), failed(1), (1, {"kind": "lost"}), DONE[0]),
        # With `--nodes`, the agent waits for the outcome.
        (ended(0), failed(1), DONE[0]),
    ],
    ids=["lost", "failed", "failed, and waits"],
)
def test_a_job_has_succeeded_although_a_host_is_lost_after_its_ranks(outcome, monkeypatch, events):
    """A restart would repeat the whole job."""
    monkeypatch.setattr(Agent, "lost_host", lambda agent: agent.host.name == "host1")
    said = []
    found = outcome(ended(1), *events, say=said.append)
    assert (found.status, found.report, found.restartable) == (0, "", False)
    assert len(said) == 1
    assert "host1: " in said[0]
    assert "so the job has not failed" in said[0]


def test_a_silent_agent_whose_ranks_have_succeeded_does_not_make_the_job_fail(outcome, monkeypatch):
    monkeypatch.setattr(Agent, "silent_since", time.monotonic())
    monkeypatch.setattr(Agent, "cut", lambda _: None, raising=False)
    said = []
    found = outcome(ended(0), ended(1), DONE[0], 4.0, lost=3.0, say=said.append)
    assert (found.status, found.report) == (0, "")
    assert said[0].startswith("lost host1: its agent has not answered for 3 s.")


def test_an_agent_that_fails_before_its_ranks_have_succeeded_is_the_cause(outcome):
    found = outcome(failed(1), END, ended(1), ended(0), *DONE)
    assert (found.status, found.failing_host(PLAN)) == (1, "host1")
    assert found.report == "host1: processes [7] did not end"


def test_a_lost_host_without_the_end_of_its_ranks_makes_the_job_fail(outcome, monkeypatch):
    monkeypatch.setattr(Agent, "lost_host", lambda agent: agent.host.name == "host1")
    found = outcome(ended(0), (1, {"kind": "lost"}), DONE[0])
    assert (found.status, found.restartable) == (1, True)


def test_a_rank_that_hangs_while_another_one_loses_the_connection_is_named(outcome):
    lost = reported(0, LOST_PEER, "peer")
    found = outcome(lost, ended(0, 1), 6.0, END, ended(1, -9), *DONE)
    assert "Rank 1 on host1 had not failed: check whether a process was" in found.possible_causes
    assert found.suspects == ()
    broken = found.with_broken([BrokenConnection("host0", "host1", "10.0.0.2", "refused")])
    causes, connections, failure = broken.report.splitlines()[:3]
    assert "had not failed" not in broken.report
    assert causes == broken.possible_causes
    assert connections.startswith("Connections that fail now: ")
    assert failure.startswith("Then rank 0 on host0 failed")
    assert broken.reason == f"{causes} {failure}"


@pytest.mark.parametrize(
    ("error", "kind"), [(LOST_PEER, "peer"), ("RuntimeError: the training failed", "own")]
)
def test_a_rank_that_has_raised_is_the_cause_although_the_launcher_ends_it(outcome, error, kind):
    """The rank needs long to end. The other one has lost the connection, and may hide this."""
    shown = printed(1, f"{TRACEBACK}\n  File a.py\nValueError: bad\n")
    first, second = (shown, BAD), (reported(0, error, kind), ended(0, 1))
    for order in ((*first, 1.0, *second), (*second, 0.0, *first)):
        if kind == "own" and order[0] != shown:
            continue  # then rank 0 was first
        found = outcome(*order, 6.0, END, ended(1, -signal.SIGTERM), *DONE)
        assert (found.status, found.suspects) == (1, (1,))
        assert found.report.startswith(
            "rank 1 on host1 failed: it raised an error, and had not ended when the launcher ended "
        )
        assert "Rank 1's last lines:" in found.report
        assert "ValueError: bad" in found.report


def test_a_job_that_succeeds_although_its_collectives_have_failed(outcome):
    content = json.loads(record(0, "x", "error")) | {"error": "failed: shut down. This", "open": []}
    said = []
    message = (0, {"kind": "record", "text": json.dumps(content | {"failed": "allreduce.x"})})
    assert outcome(message, ended(1), ended(0), *DONE, say=said.append).status == 0
    assert said[-1].startswith(
        "all ranks have ended with exit status 0, but allreduce.x had failed on rank 0 on host0: "
        "shut down. Check"
    )
    said.clear()
    assert outcome(ended(1), ended(0), *DONE, say=said.append).status == 0
    assert not said


#: Its agent was killed before it could send more.
KILLED = exited(1, -9)


@pytest.mark.parametrize(
    "events",
    [
        (ended(1, -9), *LOST),
        (KILLED, *LOST),
        (LOST[0], KILLED, LOST[1]),
        (KILLED, exited(0, -9), *LOST),
    ],
    ids=["sent", "cut", "late", "all"],
)
def test_slurm_ends_the_job_step_after_a_rank_was_killed(outcome, events):
    found = outcome(*events, aborted="srun", registered=None)
    assert found.status == 128 + 9
    assert found.restartable
    assert found.report.splitlines() == [
        "rank 1 on host1 failed: killed by signal 9 (Killed). srun then ended all other ranks.",
        "Rank 1 wrote nothing.",
    ]


def test_a_rank_that_the_kernel_has_killed_for_lack_of_memory(outcome):
    hint = "probably by the kernel, because the memory limit of its cgroup (2.0 GB) was reached"
    agent, message = ended(1, -9)
    found = outcome((agent, message | {"hint": hint}), END, ended(0, -15), *DONE)
    assert found.reason.startswith(
        f"rank 1 on host1 failed: killed by signal 9 (Killed), {hint}. The launcher ended 1 other"
    )


def test_slurm_ends_the_job_step_before_any_agent_can_report(outcome):
    raised = reported(1, "MemoryError")
    found = outcome(raised, *LOST, aborted="srun", registered=None)
    assert found.report.startswith("srun has ended all ranks of the job step")
    assert found.report.endswith("MemoryError")
    assert "rank 0" not in found.report
    assert "host" not in found.report


def test_an_agent_that_is_lost_while_the_launcher_ends_the_ranks_is_not_the_cause(outcome):
    found = outcome(ended(0, -signal.SIGTERM), END, (1, {"kind": "lost"}), (0, {"kind": "done"}))
    assert found.status == 128 + signal.SIGTERM
    assert found.report.startswith("rank 0 on host0 failed: killed by signal 15")


def test_a_launcher_that_was_not_stopped_is_not_the_cause(outcome):
    found = outcome((1, {"kind": "lost"}), (0, {"kind": "done"}), lost=4.0)
    assert found.report.startswith("lost host1: the connection to its agent has ended")


def test_ranks_that_start_while_the_launcher_is_stopped_are_not_late(outcome):
    notes = [init(1), init(0, True), init(1, True)]
    found = outcome(init(0), 70.0, *notes, ended(0), ended(1), *DONE, registered=None)
    assert (found.status, found.report) == (0, "")


def test_answers_that_arrive_while_the_launcher_is_stopped_are_read_before_a_verdict(outcome):
    said = []
    records = [
        (rank, {"kind": "record", "text": record(rank, "x", reason)})
        for rank, reason in ((0, "stall"), (0, "request"), (1, "request"))
    ]
    outcome(records[0], 20.0, *records[1:], ended(0), ended(1), *DONE, say=said.append)
    assert not said


def test_a_launcher_that_is_stopped_while_it_shows_output_does_not_blame_an_agent(
    outcome, monkeypatch
):
    monkeypatch.setattr(Agent, "silent_since", time.monotonic())
    before, stopped = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: before() + 70.0 * len(stopped))
    monkeypatch.setattr(Output, "write", lambda *_: stopped.append(True))
    output = 0, {"kind": "output", "rank": 0, "stream": "stdout", "text": "step 1"}
    found = outcome(output, ended(0), ended(1), *DONE)
    assert (found.status, found.report) == (0, "")


def test_a_slow_reader_of_the_output_does_not_delay_the_end_of_the_ranks(outcome, monkeypatch):
    before, send, written, ends = time.monotonic, Agent.send, [], []

    def note_end(agent, kind, **fields):
        send(agent, kind, **fields)
        ends.extend([len(written)] * (kind == "end"))

    # Each write takes so long that it looks like a pause of the launcher.
    monkeypatch.setattr(time, "monotonic", lambda: before() + 6.0 * len(written))
    monkeypatch.setattr(Output, "write", lambda *_: written.append(True))
    monkeypatch.setattr(Agent, "send", note_end)
    output = 1, {"kind": "output", "rank": 1, "stream": "stdout", "text": "step"}
    outcome(ended(0, 1), *[output] * 50, END, ended(1, -9), *DONE)
    assert ends[0] < 50


def test_a_suspended_job_whose_ranks_lose_each_other_when_it_continues(outcome):
    """Gloo's timeout also counts the time in which the job was suspended."""
    lost = [reported(rank, LOST_PEER, "peer") for rank in (0, 1)]
    found = outcome(70.0, *lost, ended(0, 1), ended(1, 1), *DONE)
    assert "or did not answer. This launcher did not run for 70 s" in found.report


def test_a_host_that_is_lost_after_the_ranks_of_other_hosts_have_failed_is_named(
    outcome, monkeypatch
):
    """If mpirun loses its daemon on the host, it ends the other ranks first."""
    monkeypatch.setattr(Agent, "lost_host", lambda agent: agent.host.name == "host1")
    events = ended(0, 195), 3.0, 3.0, END, (1, {"kind": "lost"}), DONE[0]
    found = outcome(*events, registered=None)
    assert "or did not answer. The launcher has lost host1" in found.possible_causes
    assert found.suspects == ()


def test_a_rank_that_ends_in_init_is_named(outcome):
    notes = [init(0), init(1), ended(1)]
    found = outcome(*notes, 4.0, END, *DONE, registered=None, start=3.0)
    assert found.report.startswith(
        "all ranks have called hvd.init(), but MPI did not connect rank 0 on host0 and rank 1 on "
        "host1 ended in hvd.init() within 3 s (--start-timeout)."
    )


def test_a_closed_standard_output_explains_the_end(outcome):
    """Otherwise `hvdkit run --launcher mpi | head` shows what mpirun says about the end."""
    found = outcome(ended(0, -15), ended(1, -15), *DONE, registered=None, stdout_closed=True)
    assert (found.status, found.report) == (128 + signal.SIGPIPE, "")
    assert outcome.explained


def test_a_rank_that_is_late_in_the_second_start_is_named(outcome):
    first = [init(0, True), init(1, True)]
    second = outcome(*first, 99.0, init(0, False, 2), 4.0, END, *DONE, registered=None, start=3.0)
    assert second.report.startswith("rank 1 on host1 did not register within 3 s")


class SlowPool:
    """Agents whose ranks end soon after SIGTERM, with much output that is shown slowly."""

    def __init__(self, connections):
        self.connections = connections
        output = {"kind": "output", "rank": 1, "stream": "stdout", "text": "step\n"}
        self.received_at = time.monotonic()
        self.left = [(1, output)] * 10 + [ended(0), ended(1, -15), *DONE]

    def next_event(self, seconds):
        if len(self.left) == 14:
            os.kill(os.getpid(), signal.SIGTERM)
        agent, message = self.left.pop(0)
        return Event(self.connections[agent], message, self.received_at)


def test_ranks_have_stopped_in_time_although_their_output_is_shown_later(monkeypatch):
    monkeypatch.setattr(Output, "write", lambda *_: time.sleep(0.2))
    with Output(2, None, None, say=print, progress=False) as output:
        pool = SlowPool([Agent(host) for host in PLAN.hosts])
        outcome = Job(PLAN, pool, output, Timeouts(stop=0.5), lambda: {0, 1}, print).run()
    assert (outcome.status, outcome.report) == (143, "ended by SIGTERM")


class SignallingPool:
    """One agent, whose rank ignores SIGTERM, and a user who sends SIGTERM again and again."""

    def __init__(self, agent):
        self.connections = [agent]

    def next_event(self, seconds):
        """Send SIGTERM to this process until the ranks are ended, for a few seconds at most."""
        time.sleep(0.05)
        (agent,) = self.connections
        if agent.ending or agent.asked > 100:
            return Event(agent, {"kind": "done"})
        os.kill(os.getpid(), signal.SIGTERM)
        return None


def test_further_signals_do_not_extend_the_time_for_an_orderly_stop():
    plan, said = make_plan(["train"], "/", [Host("host0", 1)], 1), []
    with Output(1, None, None, say=print, progress=False) as output:
        pool = SignallingPool(Agent(plan.hosts[0]))
        outcome = Job(plan, pool, output, Timeouts(stop=0.5), lambda: {0}, said.append).run()
    assert "rank 0 on host0 did not stop within 0.5 s (--stop-grace)" in outcome.report
    assert outcome.status == 128 + signal.SIGTERM
    assert said == ["SIGTERM: asking all ranks to stop"]
