import contextlib
import http.client
import time
from types import SimpleNamespace

import psutil
import pytest

from hvdkit import cli
from hvdkit.launch.control import controller, prepare
from hvdkit.launch.control.network import LOOPBACK
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.launchers import gloo
from hvdkit.launch.launchers.launcher import Workers
from hvdkit.rendezvous.server import KEY

AGENT = "hvdkit.launch.agent.main"


def put(server, path, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with contextlib.closing(http.client.HTTPConnection(server.address, server.port)) as line:
        line.request("PUT", path, b"address", headers)
        assert line.getresponse().status == 200


@pytest.mark.parametrize(
    ("engines", "counted"), [([6, 6], {1}), ([7, 6], {1}), ([6, 5], {0, 1}), ([0], {0, 1})]
)
def test_ranks_without_the_key_count_if_an_engine_cannot_send_it(engines, counted):
    facts = {number: {"engine": engine} for number, engine in enumerate(engines)}
    plan = make_plan(["true"], "/", [Host("localhost", 2)], 2)
    with controller.over_gloo(plan, facts, "127.0.0.1") as found:
        variables = found.variables(plan.places[0], LOOPBACK)
        server = SimpleNamespace(
            address="127.0.0.1", port=int(variables["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        )
        put(server, "/mesh/2.abc.1.global", variables[KEY])
        put(server, "/global/0")
        put(server, "/global/77")  # of a stranger
        assert found.registered() == counted


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_agent_that_gets_sigterm_before_the_start(monkeypatch, capfd, restarts):
    start = prepare.start_ranks

    def start_late(agents, *arguments):
        if len(ended) < 1:
            (agent,) = (c for c in psutil.Process().children() if AGENT in c.cmdline())
            agent.terminate()
            while agent.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            ended.append(agent)
        start(agents, *arguments)

    ended = []
    monkeypatch.setattr(prepare, "start_ranks", start_late)
    arguments = ["run", "--restarts", str(restarts), "-np", "1", "sh", "-c", "echo ran; exit 3"]
    assert cli.main(arguments) == (3 if restarts else 1)
    shown = capfd.readouterr()
    assert ("[0] ran" in shown.out) == bool(restarts)
    assert "localhost: its agent got SIGTERM or SIGHUP before it started rank 0" in shown.err


def test_connections_are_not_tried_without_an_agent(monkeypatch):
    """Its questions would wait for their whole time."""
    monkeypatch.setattr(gloo, "broken_connections", lambda *arguments: pytest.fail("tried"))
    agents = SimpleNamespace(
        connections=[SimpleNamespace(idle=True, ended=ended) for ended in (False, True)]
    )
    outcome = Outcome(1, "failed", restartable=True)
    interfaces = dict.fromkeys(("host1", "host2"), LOOPBACK)
    workers = Workers(agents, {}, interfaces, "127.0.0.1")
    assert gloo._with_broken(outcome, workers) is outcome
