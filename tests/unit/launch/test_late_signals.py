"""Stop signals that `hvdkit run` gets after its ranks have ended."""

import json
import signal

import pytest

from hvdkit import cli
from hvdkit.launch.control import output_folder
from hvdkit.launch.control.process_connection import ProcessConnection
from hvdkit.system.signals import begin_to_note, forget_noted, note, noted, stop_noting


@pytest.fixture(autouse=True)
def without_noted():
    forget_noted()
    yield
    forget_noted()


def test_a_noted_signal_stays_noted():
    assert not note(signal.SIGTERM)
    begin_to_note()
    assert stop_noting() is None
    assert not note(signal.SIGTERM)
    begin_to_note()
    assert note(signal.SIGTERM)
    assert note(signal.SIGINT)
    assert stop_noting() == noted() == signal.SIGTERM
    assert note(signal.SIGINT)


@pytest.fixture
def closes(monkeypatch):
    """Make a signal arrive whenever the launcher closes an agent. Return a list.

    For each closed agent, the list has what the function that the test sets returns.
    """

    class Closes(list):
        look = staticmethod(lambda: None)

    def close_slowly(connection, timeout):
        found.append(found.look())
        signal.raise_signal(signal.SIGTERM)
        close(connection, timeout)

    found, close = Closes(), ProcessConnection.close
    monkeypatch.setattr(ProcessConnection, "close", close_slowly)
    return found


def run(folder, *words):
    return cli.main(["run", "-np", "1", "--output-dir", str(folder), *words])


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize(
    "options", ["", "--restarts 0", "--restarts 1", "--elastic --restarts 0", "--nodes 1"]
)
def test_a_signal_while_the_agents_are_closed_changes_nothing(
    closes, tmp_path, capfd, options, status
):
    def look():
        start = json.loads((folder / "start.json").read_text())
        return start["status"], (folder / "error.json").exists(), capfd.readouterr().err

    folder = tmp_path / "latest"
    closes.look = look
    if "--nodes" in options:
        options += f" --node-rank 0 --rdzv-file {tmp_path}/address"
    assert run(tmp_path, *options.split(), "sh", "-c", f"exit {status}") == status
    # The outcome was shown and written before.
    written, has_error, shown = closes[0]
    assert (written, has_error) == (status, status == 3)
    assert ("failed: exit status 3" in shown) == (status == 3)
    assert "SIGTERM" not in capfd.readouterr().err


def test_a_signal_while_the_agents_are_closed_does_not_hide_an_error(closes, tmp_path, capfd):
    assert run(tmp_path, "no-such-program") == 1
    assert len(closes) == 1
    # The host finds this before the start.
    assert "localhost: no program 'no-such-program' on PATH" in capfd.readouterr().err


@pytest.mark.parametrize("options", [("--restarts", "1"), ("--elastic", "--restarts", "1")])
def test_a_signal_after_the_ranks_have_failed_prevents_the_restart(
    tmp_path, monkeypatch, capfd, options
):
    def write_error(*arguments):
        signal.raise_signal(signal.SIGTERM)
        write(*arguments)

    write = output_folder.write_error
    monkeypatch.setattr(output_folder, "write_error", write_error)
    assert run(tmp_path, *options, "sh", "-c", "exit 3") == 75
    assert (tmp_path / "latest" / "error.json").is_file()
    shown = capfd.readouterr().err
    assert "no restart after SIGTERM. The job ends with status 75" in shown
