"""Metrics for Prometheus: names, a scrape, ports, a real server, and the Grafana dashboard."""

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.launch.hosts.hosts import own_addresses
from hvdkit.monitor import PrometheusLogger
from hvdkit.monitor.loggers import metrics_server
from hvdkit.monitor.metrics import METRICS
from tests.unit.monitor.simulated import RUN, record

pytest.importorskip("prometheus_client", reason="pip install 'hvdkit[monitor-prometheus]'")

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"


@pytest.fixture
def logger():
    logger = PrometheusLogger(port=0)
    logger.open()
    yield logger
    logger.close()


def scrape(logger):
    url = f"http://127.0.0.1:{logger.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def samples(text):
    """Return (name, labels) -> value, read by Prometheus's own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape(logger):
    assert samples(scrape(logger))["hvdkit_steps_total",] == 0
    logger.begin(RUN)
    logger.log(record(10, loss=[1.0, 3.0]))
    logger.log(record(20, loss=[2.0, 6.0]))
    found = samples(scrape(logger))
    assert found["hvdkit_step",] == 20
    assert found["hvdkit_steps_total",] == 20
    assert found["hvdkit_samples_total",] == 1280
    assert found["hvdkit_ranks",] == 2
    assert found["hvdkit_slowest_rank",] == 1
    assert found["hvdkit_metric", "loss"] == 4.0
    assert found["hvdkit_metric_min", "loss"] == 2.0
    assert found["hvdkit_metric_max", "loss"] == 6.0
    assert found["hvdkit_step_duration_seconds",] == 0.75
    assert found["hvdkit_step_duration_max_seconds",] == 1.25
    assert found["hvdkit_section_duration_seconds", "communication"] == 0.75
    assert found["hvdkit_samples_per_second",] == 640
    # Payload is per step, overflows per record.
    assert found["hvdkit_payload_bytes_total",] == 0.75 * 20
    assert found["hvdkit_overflows_total",] == 0.75 * 2


def test_a_validation_keeps_the_metrics_of_the_steps(logger):
    logger.log(record(10, loss=[1.0, 3.0]))
    validation = record(10, 0, val_loss=[7.0, 7.0])
    only = {"val_loss": validation.metrics["val_loss"]}
    logger.log(type(validation)(10, 0, 1.0, 0, [0, 1], only))
    found = samples(scrape(logger))
    assert found["hvdkit_metric", "val_loss"] == 7.0
    assert found["hvdkit_metric", "loss"] == 2.0
    assert found["hvdkit_steps_total",] == 10


def test_the_server_ends_with_the_logger(logger):
    port = logger.port
    logger.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HvdkitError, match=rf"port {port} of 127.0.0.1 is in use by another"):
            PrometheusLogger(port=port).open()


def test_only_the_loopback_is_open(logger):
    # 127.0.0.2 is of this machine, too, and a server that listens everywhere answers there.
    others = {a for a in own_addresses() if ":" not in a and not a.startswith("127.")}
    for address in {"127.0.0.2", *others}:
        with pytest.raises(OSError):  # noqa: PT011
            http.client.HTTPConnection(address, logger.port, timeout=2).request("GET", "/metrics")


#: Hold connections, as another user if this is root: of each, send the beginning of a request, and
#: read nothing. The other user may not be able to read Python's files, so import everything first.
SLOW = """
import os, socket, sys, time, encodings.idna
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20))
    held[-1].sendall(b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n")
print("up", flush=True)
sys.stdin.read()
"""
#: A process that trains, with few descriptors.
TRAINING = """
import resource, sys
from hvdkit.monitor import PrometheusLogger
from hvdkit.monitor.loggers import metrics_server
logger = PrometheusLogger(port=0)
logger.open()
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(logger.port, flush=True)
sys.stdin.readline()
files = [open("/dev/null") for _ in range(16)]
print("trained", flush=True)
sys.stdin.readline()
logger.close()
"""


@contextmanager
def slow_clients(port, number):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(port), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "up\n"
        yield
    finally:
        process.communicate(timeout=30)


def test_slow_clients_use_few_threads_and_descriptors(logger):
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    scrape(logger)
    with slow_clients(logger.port, 200):
        assert threading.active_count() <= threads
        more = len(os.listdir("/proc/self/fd")) - files
        assert more <= metrics_server.MOST_CONNECTIONS + 5  # of the other process
        assert samples(scrape(logger))["hvdkit_steps_total",] == 0


def test_a_training_with_few_descriptors_continues():
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(training.stdout.readline())
        with slow_clients(port, 60):
            training.stdin.write("\n")
            training.stdin.flush()
            assert training.stdout.readline() == "trained\n"
        training.stdin.write("\n")
        training.stdin.flush()
        assert training.wait(timeout=30) == 0
    finally:
        training.kill()
        training.communicate(timeout=30)


def ask_server(server, sent):
    """Send bytes to a server, and return its answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(sent)
        answer = b""
        with suppress(ConnectionResetError):  # it has not read everything
            while data := connection.recv(65_536):
                answer += data
    return answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\r\n\r\n", b"400"),
        (b"\xff\x00 \xff\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\n" + b"a" * 17_000, b"431"),
        (b"GET / HTTP/1.1\r\nAccept: \xff;\x00\r\n:\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\naccept: x, application/openmetrics-text;version=9\r\n\r\n", b"200"),
    ],
)
def test_requests_of_strangers(logger, sent, status):
    head, _, body = ask_server(logger, sent).partition(b"\r\n\r\n")
    assert head.split()[1] == status
    assert body.endswith(b"# EOF\n") == (b"openmetrics" in sent)
    assert samples(scrape(logger))["hvdkit_steps_total",] == 0


def test_a_head_request(logger):
    answer = ask_server(logger, b"HEAD / HTTP/1.1\r\n\r\n")
    length = len(scrape(logger).encode())
    assert f"Content-Length: {length}\r\n".encode() in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("sent", [b"GET / HT", b"GET / HTTP/1.1\r\n\r\n"])
def test_clients_that_send_or_read_nothing_are_disconnected(monkeypatch, sent):
    monkeypatch.setattr(metrics_server, "SECONDS", 0.5)
    server = metrics_server.MetricsServer("127.0.0.1", 0, lambda _: (bytes(50_000_000), "x"))
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(sent)
            time.sleep(1.5)
            assert not server._clients
            left = 0
            with suppress(ConnectionResetError):
                while data := connection.recv(1 << 20):
                    left += len(data)
            assert left < 50_000_000
    finally:
        server.close()


def test_an_error_of_the_text_is_an_error_of_the_request(caplog):
    def render(accept):
        raise ZeroDivisionError

    server = metrics_server.MetricsServer("127.0.0.1", 0, render)
    try:
        for _ in range(2):
            assert b" 500 " in ask_server(server, b"GET / HTTP/1.1\r\n\r\n")
    finally:
        server.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def families(logger):
    """Return the names of all metrics that can appear."""
    logger.begin(RUN)
    logger.log(record(10, loss=[1.0, 3.0]))
    return {name for name, *_ in samples(scrape(logger))}


def test_the_dashboard_uses_only_existing_metrics(logger):
    names = families(logger)
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    used = {name for text in expressions for name in re.findall(r"\bhvdkit_\w+", text)}
    assert used
    assert not used - names
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_guide_lists_every_metric(logger):
    guide = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
    for name in METRICS:
        assert f"`{name}`" in guide, name
    for name in families(logger):
        stem = re.sub(r"_(min|max)(?=_|$)", "", name)
        assert f"`{stem}`" in guide, stem


@pytest.fixture
def prometheus(tmp_path, logger):
    """Return the address of a real Prometheus server that scrapes the logger."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus here: apt-get install prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [
                    {
                        "job_name": "hvdkit",
                        "static_configs": [{"targets": [f"127.0.0.1:{logger.port}"]}],
                    }
                ],
            }
        )
    )
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [
                program,
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(30)


def ask(server, query):
    url = f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []  # the server is starting


@pytest.mark.long
def test_a_real_server_scrapes_and_the_dashboard_has_data(logger, prometheus):
    logger.begin(RUN)
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = {
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    }
    left = {text.replace("$__rate_interval", "10s") for text in expressions}
    deadline = time.monotonic() + 120
    step = 0
    while left and time.monotonic() < deadline:
        step += 10
        logger.log(record(step, loss=[1.0, 3.0]))
        time.sleep(0.5)
        left = {text for text in left if not ask(prometheus, text)}
    assert not left
    (found,) = ask(prometheus, 'hvdkit_metric{name="loss"}')
    assert float(found["value"][1]) == 2.0
    (up,) = ask(prometheus, 'up{job="hvdkit"}')
    assert up["value"][1] == "1"


@pytest.mark.long
def test_promtool_accepts_the_names(logger):
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    families(logger)
    done = subprocess.run(
        [program, "check", "metrics"],
        input=scrape(logger),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
