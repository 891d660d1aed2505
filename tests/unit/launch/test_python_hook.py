"""The hook in a rank's Python reports the end of the rank, and changes nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hvdkit.launch
from hvdkit.faults.record_folder import RecordFolder
from tests.unit.launch.commands import execute

HOOK = Path(hvdkit.launch.__file__).parent / "agent" / "hook"
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
    own = {"PYTHONPATH": str(HOOK), "HVDKIT_RECORD_DIR": str(folder), "HVDKIT_REPORT_RANK": "1"}
    command = [sys.executable, "-c", script] if isinstance(script, str) else script
    streams = {"capture_output": False, "stdout": -1, "stderr": subprocess.STDOUT}
    done = execute(command, env=os.environ | own, **streams)
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
    folder = RecordFolder()
    vars(folder)["_owned"] = SimpleNamespace(path=tmp_path)
    run(tmp_path, "import no_such_module")
    assert [each[2]["how"] for each in folder.reports()] == ["exception"]
    run(tmp_path, "import os; os._exit(9)")
    assert [(each[0], each[2]["how"]) for each in folder.reports()] == [(1, "start")]
    assert list(folder.reports()) == []
    run(tmp_path, "import no_such_module")
    assert [each[2]["how"] for each in folder.reports()] == ["exception"]
    run(tmp_path, "")
    assert [each[2]["how"] for each in folder.reports()] == ["end"]
