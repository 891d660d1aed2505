import io
import json
import subprocess
import sys

from hvdkit import doctor
from hvdkit.console.diagnostics import ERROR, OK, WARNING, Diagnostic, has_error, show
from hvdkit.console.tables import Console
from hvdkit.engine import describe


def test_doctor_checks_this_machine():
    answer = subprocess.run(
        [sys.executable, "-m", "hvdkit", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    report = json.loads(answer.stdout)
    names = [f["name"] for f in report["findings"]]
    for name in ("Python", "system", "CPU and RAM", "GPUs", "compiler", "CMake", "MPI"):
        assert name in names
    for name in ("CUDA, NCCL", "Horovod", "/dev/shm", "reductions", "hostname"):
        assert name in names
    assert all(f["advice"] for f in report["findings"] if f["status"] != "ok")
    assert (answer.returncode == 1) == (report["status"] == "error")


def test_a_missing_horovod_is_an_error_with_advice(monkeypatch):
    monkeypatch.setattr(describe, "installed", lambda: None)
    (found,) = doctor._horovod([])
    assert found.status == ERROR
    assert found.advice == "run `hvdkit build`"
    assert has_error([found])


def test_a_hostname_that_resolves_to_loopback_is_a_warning():
    found = doctor._hostname(lambda name: "127.0.1.1")
    assert found.status == WARNING
    assert "HOROVOD_GLOO_IFACE" in found.advice
    assert doctor._hostname(lambda name: "10.1.2.3").status == OK


def test_a_hostname_that_does_not_resolve_is_a_warning():
    def resolve(name):
        raise OSError("Name or service not known")

    assert "does not resolve" in doctor._hostname(resolve).found


def test_missing_headers_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    found = doctor._python()
    assert found.status == WARNING
    assert "python3-dev" in found.advice


def test_a_small_shm_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_SHM_BYTES", 10**18)
    assert doctor._shared_memory().status == WARNING


def test_an_extension_that_does_not_load_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    framework = doctor.frameworks.Framework("torch", "2.13.0", True, None)
    found = doctor._extension(framework, "2.12.0")
    assert found.status == ERROR
    assert "undefined symbol" in found.found
    assert "hvdkit build" in found.advice


def test_advice_is_shown_below_the_line():
    out = io.StringIO()
    diagnostics = [
        Diagnostic("one", OK, "fine"),
        Diagnostic("two", WARNING, "[odd]", "do this"),
    ]
    show(diagnostics, Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["ok", "one", "fine"]
    assert lines[1].split() == ["warning", "two", "[odd]"]
    assert lines[2].strip() == "-> do this"


def test_why_ranks_of_one_host_use_sockets(monkeypatch):
    assert doctor._reductions({}).status == OK
    assert "HVDKIT_COLLECTIVES is flat" in doctor._reductions({"HVDKIT_COLLECTIVES": "flat"}).found
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (2**40, 2**40))
    limited = doctor._reductions({})
    assert limited.status == WARNING
    assert "ulimit -v" in limited.advice
