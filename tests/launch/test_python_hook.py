"""The hook in a rank's Python reports the end of the rank, and changes nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvdkit.launch
from hvdkit.faults.rank_report import LOST_PEER, RankReports

HOOK = Path(hvdkit.launch.__file__).parent / "hook"
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
