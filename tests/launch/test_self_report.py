"""What the first Python of a rank reports of its end, and that it changes nothing else."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvdkit.launch
from hvdkit.faults.rank_report import LOST_PEER, RankReports

HOOK = Path(hvdkit.launch.__file__).parent / "hook"
FILE = HOOK / "_hvdkit_self_report.py"


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("self_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_class(name, base=RuntimeError):
    module, _, name = name.rpartition(".")
    return type(name, (base,), {"__module__": module})


ENGINE = of_class("horovod.common.exceptions.HorovodInternalError")
TENSORFLOW = of_class("tensorflow.python.framework.errors_impl.OpError", Exception)
UNKNOWN = type("UnknownError", (TENSORFLOW,), {"__module__": TENSORFLOW.__module__})
SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"
GLOO = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1.2.3]:3985"


def caused(error, cause):
    error.__cause__ = cause
    return error


def handled(error, context, suppress):
    error.__context__, error.__suppress_context__ = context, suppress
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ENGINE(SHUT_DOWN), "peer"),
        (ENGINE("collective in shared memory: rank 1 has ended"), "peer"),
        (ENGINE("collective over the network, waiting for rank 3: timed out"), "peer"),
        (ENGINE(GLOO), "peer"),
        (ENGINE("Mismatched allreduce tensor shapes"), "own"),
        # The rank itself has failed in the collective.
        (ENGINE("CUDA error: an illegal memory access was encountered"), "own"),
        (UNKNOWN(SHUT_DOWN), "peer"),
        (UNKNOWN("OOM when allocating tensor"), "own"),
        (of_class("torch.distributed.DistBackendError")("NCCL error"), "peer"),
        (RuntimeError(GLOO), "peer"),
        (ConnectionResetError(104, "Connection reset by peer"), "connection"),
        (ValueError("bad"), "own"),
        (caused(RuntimeError("step 7 failed"), ENGINE(SHUT_DOWN)), "peer"),
        (handled(KeyError("metric"), ENGINE(SHUT_DOWN), False), "peer"),
        (handled(KeyError("metric"), ENGINE(SHUT_DOWN), True), "peer"),
        (ExceptionGroup("of workers", [ENGINE(SHUT_DOWN), ENGINE(SHUT_DOWN)]), "peer"),
        (ExceptionGroup("of workers", [ENGINE(SHUT_DOWN), ValueError("bad")]), "own"),
    ],
    ids=str,
)
def test_the_kind_of_an_exception(report, error, kind):
    assert report._kind(error) == kind


@pytest.mark.parametrize(("function", "kind"), [("init", "start"), ("allreduce", "refused")])
def test_the_kind_of_an_error_of_horovods_python_code(report, function, kind):
    space = {"__name__": "horovod.common.basics"}
    exec(f"def {function}(): raise ValueError('Horovod initialization failed')", space)
    with pytest.raises(ValueError, match="failed") as error:
        space[function]()
    assert report._kind(error.value) == kind


def test_a_chain_of_exceptions_without_end(report):
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert report._kind(first) == "own"


# Horovod's class, and the function of Horovod that raises it for each RuntimeError.
HOROVOD = """
import sys
class HorovodInternalError(RuntimeError): pass
HorovodInternalError.__module__ = "horovod.common.exceptions"
names = {"__name__": "horovod.torch.mpi_ops", "HorovodInternalError": HorovodInternalError}
exec('''
def synchronize(wait):
    try:
        wait()
    except RuntimeError as error:
        raise HorovodInternalError(error)
def lost():
    raise RuntimeError("Horovod has been shut down")
''', names)
synchronize, lost = names["synchronize"], names["lost"]
"""


def run(folder, script):
    """Run a script as the Python of a rank; return its status, its output and its report."""
    env = {**os.environ, "PYTHONPATH": str(HOOK), "HVDKIT_RECORD_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", script] if isinstance(script, str) else script,
        env={**env, "HVDKIT_REPORT_RANK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    reports = [json.loads(file.read_text()) for file in folder.glob("end-1-*.json")]
    assert len(reports) < 2
    return done.returncode, done.stdout, reports[0] if reports else None


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("synchronize(lost)", "peer"),
        # A handler of a signal raises while the rank waits, such as that of torch's DataLoader for
        # a worker that was killed.
        ("def handler(): raise RuntimeError('worker is killed')\nsynchronize(handler)", "own"),
        # The script hides the error, also from Python's traceback.
        (
            "try: synchronize(lost)\nexcept RuntimeError: raise ValueError('failed') from None",
            "peer",
        ),
        ("try: lost()\nexcept RuntimeError: raise ValueError('failed') from None", "own"),
    ],
)
def test_the_kind_of_an_error(tmp_path, script, kind):
    status, _, report = run(tmp_path, HOROVOD + script)
    assert (status, report["how"], report["kind"]) == (1, "exception", kind)


@pytest.mark.parametrize(
    "handled",
    [
        "code.InteractiveInterpreter().runsource('1/0')",
        "sys.excepthook(None, None, None)",
        "threading.Thread(target=lambda: 1/0).start()",
    ],
)
def test_an_exception_that_the_program_prints_is_not_its_end(tmp_path, handled):
    script = f"import code, sys, threading\n{handled}\nsys.exit(3)"
    status, _, report = run(tmp_path, script)
    assert (status, report["error"]) == (3, "")


def test_sys_exit_can_be_sent_to_another_process(tmp_path):
    script = "import pickle, sys\nassert pickle.loads(pickle.dumps(sys.exit)) is sys.exit"
    status, text, _ = run(tmp_path, script)
    assert status == 0, text


def test_a_report_counts_until_the_command_starts_another_python(tmp_path):
    """A shell looks for a module first, and then runs the script, which is killed."""
    reports = RankReports()
    run(tmp_path, "import no_such_module")
    assert [each[2]["how"] for each in reports.new(tmp_path)] == ["exception"]
    run(tmp_path, "import os; os._exit(9)")
    assert [(each[0], each[2]["how"]) for each in reports.new(tmp_path)] == [(1, "start")]
    assert list(reports.new(tmp_path)) == []
    run(tmp_path, "import no_such_module")
    assert [each[2]["how"] for each in reports.new(tmp_path)] == ["exception"]
    run(tmp_path, "")
    assert [each[2]["how"] for each in reports.new(tmp_path)] == ["end"]


def test_the_launcher_and_the_rank_know_the_same_errors_of_lost_peers():
    script = "import sys\nsys.path.insert(0, sys.argv[1])\nimport _hvdkit_self_report as hook\n"
    show = [sys.executable, "-c", f"{script}print(hook._LOST_PEER)", str(HOOK)]
    assert subprocess.check_output(show, text=True, timeout=60).strip() == str(LOST_PEER)
