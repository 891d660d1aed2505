"""What the launcher does while a job runs, after messages of simulated agents in a given order.

`test_outcome.py` has the outcome of events.
"""

import errno
import json
import signal
import time
from types import SimpleNamespace

import pytest

from hvdkit.launch.control.connection import Event
from hvdkit.launch.control.controller import Controller, over_mpi
from hvdkit.launch.control.job import Job
from hvdkit.launch.control.output import Output, _NullStream
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.hosts.hosts import Host
from tests.unit.launch.test_stalls import record

#: The plan of each job here.
PLAN = make_plan(["true"], "/", [Host("host0", 1), Host("host1", 1)], 2)
#: An event: the launcher ends the ranks.
END = "end"


class Agent:
    """An agent without a process."""

    idle = ending = False
    silent_since = float("inf")

    def __init__(self, host):
        self.host = host

    def send(self, kind, **fields):
        self.ending = self.ending or kind == "end"

    def lost_host(self):
        return False

    def silence(self, now):
        pass

    def explain(self):
        return "the connection to its agent has ended"


@pytest.fixture
def job(monkeypatch, said):
    """Return a function that returns the outcome of a job of two ranks, one on each host.

    Its events are messages with the number of an agent, and maybe the time at which they have
    arrived; signals; seconds that pass; or `END`. What the launcher says is in `said`.
    """
    passed, monotonic = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed)

    def run(*events, mpi=False, stdout_closed=False, **timeouts):
        agents = [Agent(host) for host in PLAN.hosts]
        left, began = list(events), monotonic()
        said.clear()

        def next_event(_):
            nonlocal passed
            if not left or (left[0] == END and not agents[0].ending):
                assert monotonic() < began + 20, "the job does not end"
                return None
            event = left.pop(0)
            if isinstance(event, tuple):
                number, message, *at = event
                return Event(agents[number], message, at[0] if at else time.monotonic())
            if isinstance(event, signal.Signals):
                signal.raise_signal(event)
            else:
                passed += 0.0 if event == END else event
            return None

        external = SimpleNamespace(killed=lambda: "", aborted=lambda: "")
        pool = SimpleNamespace(connections=agents, next_event=next_event, external=external)
        controller = over_mpi({}) if mpi else Controller(lambda *_: {}, lambda: {0, 1})
        with Output(2, None, None, progress=False) as output:
            if stdout_closed:
                output._streams["stdout"] = _NullStream(BrokenPipeError(errno.EPIPE, ""))
            found = Job(PLAN, pool, output, Timeouts(**timeouts), controller).run()
        run.explained = external.explained
        return found

    run.said = said
    return run


def init(rank, connected=False, start=1):
    state = {"start": start, "connected": connected, "leaving": False}
    return rank, {"kind": "init", "rank": rank, **state}


def ended(rank, status=0):
    return rank, {"kind": "ended", "rank": rank, "status": status}


def printed(rank, text):
    return rank, {"kind": "output", "rank": rank, "stream": "stdout", "text": text}


def lost_peer(rank):
    """Return the message that a rank has reported the loss of another one."""
    error = "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down"
    content = {"how": "exception", "error": error, "kind": "peer", "chained": False}
    report = content | {"traceback": ["Traceback (most recent call last):", error]}
    return rank, {"kind": "report", "rank": rank, "age": 0.0, "report": report}


#: The last messages of both agents.
DONE = (0, {"kind": "done"}), (1, {"kind": "done"})
LOST = 1, {"kind": "lost"}


# A launcher that was stopped, or that shows the output slowly


@pytest.mark.parametrize("stop", [False, True], ids=["failure", "stop signal"])
def test_after_a_slow_write_the_messages_that_have_arrived_are_read_before_a_deadline(job, stop):
    """For example, the reader of the output was stopped for 200 s."""
    first = [signal.SIGTERM] if stop else [(1, {"kind": "failed", "reason": "no memory"}), END]
    found = job(*first, 200, ended(0, 75), ended(1, 75), *DONE)
    assert "did not" not in found.report
    assert found.status == (75 if stop else 1)


def test_ranks_have_stopped_in_time_although_their_output_is_shown_later(job, monkeypatch):
    before, written = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: before() + 0.5 * len(written))
    monkeypatch.setattr(Output, "write", lambda *_: written.append(True))
    messages = [printed(1, "step")] * 10 + [ended(0), ended(1, -15), *DONE]
    arrived = [(*message, before()) for message in messages]
    found = job(signal.SIGTERM, *arrived, stop=2.0)
    assert (found.status, found.report) == (143, "ended by SIGTERM")


def test_an_agent_that_ends_because_the_launcher_was_stopped_does_not_count(job):
    found = job(70.0, LOST, END, ended(0, -15), DONE[0])
    assert "this launcher did not run for 70 s" in found.report
    assert found.failing_host(PLAN) is None


def test_ranks_that_start_while_the_launcher_is_stopped_are_not_late(job):
    notes = [init(1), init(0, True), init(1, True)]
    found = job(init(0), 70.0, *notes, ended(0), ended(1), *DONE, mpi=True)
    assert (found.status, found.report) == (0, "")


def test_answers_that_arrive_while_the_launcher_is_stopped_are_read_before_a_verdict(job):
    records = [
        (rank, {"kind": "record", "text": record(rank, "x", reason)})
        for rank, reason in ((0, "stall"), (0, "request"), (1, "request"))
    ]
    job(records[0], 20.0, *records[1:], ended(0), ended(1), *DONE)
    assert not job.said


def test_a_launcher_that_is_stopped_while_it_shows_output_does_not_blame_an_agent(job, monkeypatch):
    monkeypatch.setattr(Agent, "silent_since", time.monotonic())
    before, stopped = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: before() + 70.0 * len(stopped))
    monkeypatch.setattr(Output, "write", lambda *_: stopped.append(True))
    found = job(printed(0, "step 1"), ended(0), ended(1), *DONE)
    assert (found.status, found.report) == (0, "")


def test_a_slow_reader_of_the_output_does_not_delay_the_end_of_the_ranks(job, monkeypatch):
    before, send, written, ends = time.monotonic, Agent.send, [], []

    def note_end(agent, kind, **fields):
        send(agent, kind, **fields)
        ends.extend([len(written)] * (kind == "end"))

    # Each write takes so long that it looks like a pause of the launcher.
    monkeypatch.setattr(time, "monotonic", lambda: before() + 6.0 * len(written))
    monkeypatch.setattr(Output, "write", lambda *_: written.append(True))
    monkeypatch.setattr(Agent, "send", note_end)
    job(ended(0, 1), *[printed(1, "step")] * 50, END, ended(1, -9), *DONE)
    assert ends[0] < 50


def test_a_suspended_job_whose_ranks_lose_each_other_when_it_continues(job):
    """Gloo's timeout also counts the time in which the job was suspended."""
    found = job(70.0, lost_peer(0), lost_peer(1), ended(0, 1), ended(1, 1), *DONE)
    assert "or did not answer. This launcher did not run for 70 s" in found.report


# Signals


@pytest.mark.parametrize(("seconds", "is_second"), [(0.0, False), (0.3, False), (0.6, True)])
def test_a_terminal_and_a_wrapper_may_both_send_ctrl_c(job, seconds, is_second):
    presses = (signal.SIGINT, seconds, signal.SIGINT, seconds / 10, signal.SIGINT)
    assert job(*presses, ended(0, 75), ended(1, 75), *DONE).status == 75
    assert ("ending all ranks now" in job.said) == is_second


def test_further_signals_extend_neither_the_time_for_a_stop_nor_for_the_end(job):
    """The agents do not answer, for example because their hosts hang."""
    again = (4.0, signal.SIGINT) * 5
    last = ended(0, -9), ended(1, -9), *DONE
    found = job(signal.SIGINT, 1.0, signal.SIGINT, *again, *last)
    assert found.status == 130
    assert "host0, host1 did not confirm that its ranks have ended" in found.report
    found = job(signal.SIGTERM, 1.5, signal.SIGTERM, 1.0, END, *last, stop=2.0)
    assert found.report.startswith("ended by SIGTERM\nranks 0 on host0, 1 on host1 did not stop wi")
    assert job.said == ["SIGTERM: asking all ranks to stop"]


def test_agents_that_get_signals_are_named(job):
    agents = [
        (agent, {"kind": "signalled", "number": number})
        for agent, number in ((0, signal.SIGTERM), (1, signal.SIGHUP), (1, signal.SIGTERM))
    ]
    found = job(*agents, ended(0, 75), ended(1, 75), *DONE)
    assert found.report.startswith("the agents on host0, host1 got SIGTERM\nstopped; start")
    assert job.said == ["the agent on host0 got SIGTERM: asking its ranks to stop"]


def test_a_closed_standard_output_explains_the_end(job):
    """Otherwise `hvdkit run --launcher mpi | head` shows what mpirun says about the end."""
    found = job(ended(0, -15), ended(1, -15), *DONE, mpi=True, stdout_closed=True)
    assert (found.status, found.report) == (128 + signal.SIGPIPE, "")
    assert job.explained


# Agents, hosts and starts


@pytest.mark.parametrize("how", ["lost", "failed", "silent"])
def test_an_agent_that_does_not_confirm_the_end_of_successful_ranks_is_named(job, monkeypatch, how):
    """A restart would repeat the whole job. With `--nodes`, an agent waits for the outcome."""
    failed = 1, {"kind": "failed", "reason": "processes [7] did not end"}
    events = {"lost": [LOST, ended(0)], "failed": [ended(0), failed]}
    if how == "silent":
        events[how] = [ended(0), DONE[0], 4.0]
        monkeypatch.setattr(Agent, "silent_since", time.monotonic())
        monkeypatch.setattr(Agent, "cut", lambda _: None, raising=False)
    found = job(ended(1), *events[how], DONE[0], lost=3.0)
    assert (found.status, found.report, found.restartable) == (0, "", False)
    (said,) = job.said
    begin = {"failed": "host1: ", "silent": "lost host1: its agent has not answered for 3 s."}
    assert said.startswith(begin.get(how, "lost host1: "))
    assert "so the job has not failed" in said


def test_a_host_that_is_lost_after_the_ranks_of_other_hosts_have_failed_is_named(job, monkeypatch):
    """If mpirun loses its daemon on the host, it ends the other ranks first."""
    monkeypatch.setattr(Agent, "lost_host", lambda agent: agent.host.name == "host1")
    found = job(ended(0, 195), 3.0, 3.0, END, LOST, DONE[0], mpi=True)
    assert (found.status, found.suspects) == (1, ())
    assert found.report.startswith("lost host1: ")


def test_a_job_that_succeeds_although_its_collectives_have_failed(job):
    content = json.loads(record(0, "x", "error")) | {"error": "failed: shut down. This", "open": []}
    message = (0, {"kind": "record", "text": json.dumps(content | {"failed": "allreduce.x"})})
    assert job(message, ended(1), ended(0), *DONE).status == 0
    assert job.said[-1].startswith(
        "all ranks have ended with exit status 0, but allreduce.x had failed on rank 0 on host0: "
        "shut down. Check"
    )
    assert job(ended(1), ended(0), *DONE).status == 0
    assert not job.said


def states(rank, *stopped):
    """Return the answer to the question which ranks of an agent are stopped."""
    return rank, {"kind": "states", "states": {str(rank): "stopped" for rank in stopped}}


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        (
            [init(0), init(1), ended(1), 4.0, states(0)],
            "all ranks have called hvd.init(), but MPI did not connect rank 0 on host0 and rank 1 "
            "on host1 ended in hvd.init() within 3 s (--start-timeout).",
        ),
        # Late in the second start.
        (
            [init(0, True), init(1, True), 99.0, init(0, False, 2), 4.0, states(1), states(0)],
            "rank 1 on host1 did not register within 3 s",
        ),
        # Its agent takes some time to answer.
        (
            [init(0), 4.0, states(0), 4.0, states(1, 1)],
            "rank 1 on host1 did not register within 3 s of the first rank (--start-timeout). Rank "
            "1 on host1 is stopped (SIGSTOP)",
        ),
        # An agent that is stopped.
        ([init(0), 4.0, states(0), 3.0, 3.0, 3.0, 3.0], "rank 1 on host1 did not register"),
    ],
)
def test_a_rank_that_is_late_in_init_is_named(job, notes, text):
    assert job(*notes, END, *DONE, mpi=True, start=3.0, lost=9.0).report.startswith(text)
