"""`hvdkit run` on this machine."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.engine.describe import installed
from hvdkit.engine.toolchain import which
from tests.parallel.rank_pool import Configuration, skip_where_unsupported

RANK = "import os, signal, sys, time; rank = int(os.environ['HOROVOD_RANK']);"


def command(*arguments):
    return [sys.executable, "-m", "hvdkit", "run", *arguments]


def run(*arguments, **options):
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=60, check=False, **options
    )


def python(code):
    return (sys.executable, "-c", RANK + code)


@pytest.mark.parametrize(
    "comm",
    [
        "MPI.COMM_WORLD.Split(half)",
        pytest.param("[2 * half, 2 * half + 1]", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_two_jobs_inside_one_mpirun(comm):
    engine = installed()
    if engine is None or "torch" not in engine.frameworks or which("mpirun") is None:
        pytest.skip("no Horovod for torch over MPI here")
    if engine.controllers is not None and "mpi" not in engine.controllers:
        pytest.skip("Horovod was built without MPI here")
    pytest.importorskip("mpi4py")
    code = f"""
import torch
from mpi4py import MPI
import hvdkit.torch as hvd

rank = MPI.COMM_WORLD.Get_rank()
half = rank // 2
hvd.init(comm={comm})
total = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum)
print(half, hvd.rank(), hvd.size(), total.item())
hvd.shutdown()
"""
    done = run("--launcher", "mpi", "-np", "4", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 0 2 1.0",
        "[1] 0 1 2 1.0",
        "[2] 1 0 2 5.0",
        "[3] 1 1 2 5.0",
    ]


def test_the_ranks_run_where_the_launcher_does_with_its_environment(tmp_path):
    code = "print(os.getcwd(), os.environ['GREETING'])"
    # A module that shadows one of Python's own must not affect the launcher.
    (tmp_path / "selectors.py").write_text("raise SystemExit('shadowed')")
    # PYTHONSAFEPATH makes `-m hvdkit` behave like the installed command `hvdkit`.
    env = os.environ | {"GREETING": "hello", "PYTHONSAFEPATH": "1"}
    done = run("-np", "1", *python(code), cwd=tmp_path, env=env)
    assert done.stdout == f"[0] {tmp_path} hello\n", done.stderr


def test_a_working_directory_that_was_deleted(tmp_path):
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    env = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        ["sh", "-c", script, "-", *command("-np", "1", *python(""))],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    named = f"hvdkit run: the working directory {tmp_path}/gone does not exist any more"
    assert done.stderr.startswith(named)


def test_options_after_the_command_belong_to_the_command():
    done = run("-np", "1", "--", *python("print(sys.argv[1:])"), "-np", "3", "--help")
    assert done.stdout == "[0] ['-np', '3', '--help']\n"


@pytest.mark.parametrize(
    ("arguments", "visible", "ranks", "stderr"),
    [
        ((), "4,7", 2, "2 ranks, one for each GPU"),
        (("-np", "auto"), "4,7", 2, "2 ranks, one for each GPU"),
        ((), "", 1, "1 rank, because there is no GPU here; -np N starts N"),
        (("-np", "3"), "4,7", 3, ""),
        (("-H", "localhost:2"), "4", 2, ""),
    ],
)
def test_the_number_of_ranks(arguments, visible, ranks, stderr):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    done = run(*arguments, *python("print(rank)"), env=env)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank}" for rank in range(ranks)]
    assert done.stderr == (f"hvdkit run: {stderr}\n" if stderr else "")


def test_the_hosts_of_a_batch_system_are_used(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("localhost\nlocalhost\n")
    done = run(*python("print(rank)"), env=os.environ | {"PBS_NODEFILE": str(nodes)})
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1"]
    assert done.stderr == "hvdkit run: the hosts of PBS_NODEFILE: localhost:2\n"


TORCH_ENV = """
import os
import torch
import torch.distributed as dist
import hvdkit.torch as hvd

hvd.init()
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
         "GLOBAL_RANK", "NNODES")
print(dist.get_rank() == hvd.rank(), dist.get_world_size(), total.item(),
      hvd.allreduce(total + hvd.rank(), op=hvd.Sum).item(), *(os.environ[name] for name in names))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_ranks_reduce_with_horovod_and_torch_distributed(launcher):
    skip_where_unsupported(Configuration("torch", launcher, 2))
    env = os.environ | {"OMP_NUM_THREADS": "1", "RANK": "5", "GLOBAL_RANK": "5", "NNODES": "9"}
    how = ("--launcher", launcher, "-np", "2")
    done = run(*how, sys.executable, "-c", TORCH_ENV, env=env)
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] True 2 2.0 5.0 {rank} 2 0 1 0 {rank} 1" for rank in range(2)
    ], done.stderr


# The parent of a rank is its keeper, and the parent of that is the agent.
AGENT = "psutil.Process(os.getppid()).ppid()"


@pytest.mark.parametrize("killed", ["os.getpid()", AGENT], ids=["rank", "agent"])
@pytest.mark.parametrize("init", ["", pytest.param("hvd.init();", marks=pytest.mark.long)])
def test_a_killed_rank_over_mpi_leaves_no_shared_memory(init, killed):
    skip_where_unsupported(Configuration("torch", "mpi", 2))
    code = (
        "import os, time, psutil; rank = int(os.environ['OMPI_COMM_WORLD_RANK']);"
        "folder = os.environ['OMPI_MCA_btl_sm_backing_directory']; print(folder, flush=True);"
        f"open(folder + '/file', 'w').close(); {init} time.sleep(1);"
        f"rank == 0 and os.kill({killed}, 9); time.sleep(60)"
    )
    imports = "import hvdkit.torch as hvd; " if init else ""
    done = run("--launcher", "mpi", "-np", "2", sys.executable, "-c", imports + code)
    folders = [line.split()[-1] for line in done.stdout.splitlines()]
    assert len(folders) == 2
    assert all(folder.startswith("/dev/shm/hvdkit-mpi-") for folder in folders)
    assert not any(os.path.exists(folder) for folder in folders)
    # What mpirun says about a failed rank blames the program for a missing call.
    assert ("hvdkit run: mpirun: " in done.stderr) == (killed == AGENT), done.stderr


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_ranks_that_wait_for_a_rank_that_has_ended_do_not_wait_for_long(launcher):
    skip_where_unsupported(Configuration("torch", launcher, 2))
    code = (
        "import os, torch, hvdkit.torch as hvd\n"
        "hvd.init()\n"
        "hvd.allreduce(torch.ones(1), name='a')\n"
        "if hvd.rank() == 1: os._exit(0)\n"
        "hvd.allreduce(torch.ones(1), name='b')"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "HVDKIT_STALL_TIMEOUT": "3"}
    done = run("--launcher", launcher, "-np", "3", sys.executable, "-c", code, env=env)
    assert done.returncode == 1
    expected = {
        "gloo": "Rank 1 on localhost had ended without an error",
        "mpi": (
            "Rank 1 on localhost has not called it: the process has ended.\nEvery rank that still "
            "runs waits for a rank that has ended: the job cannot continue."
        ),
    }
    assert expected[launcher] in done.stderr


def test_a_killed_mpirun_is_named(tmp_path):
    skip_where_unsupported(Configuration("torch", "mpi", 2))
    code = (
        "import os, signal, time, psutil, hvdkit.torch as hvd\n"
        "hvd.init()\n"
        f"if hvd.rank() == 1: os.kill(psutil.Process({AGENT}).ppid(), signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    # Open MPI's folder, which a killed mpirun leaves.
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = run("--launcher", "mpi", "-np", "2", sys.executable, "-c", code, env=env)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdkit run: ")]
    assert lines == ["hvdkit run: mpirun was killed by signal 9 (Killed). This ends all ranks."]


def test_mpi_in_a_rank_over_gloo_leaves_no_shared_memory():
    # Lightning's Trainer imports this module in each rank.
    pytest.importorskip("mpi4py")
    code = (
        "import os; from mpi4py import MPI;"
        "folder = os.environ['OMPI_MCA_btl_sm_backing_directory'];"
        "print(folder, len(os.listdir(folder)) > 0)"
    )
    done = run("-np", "2", sys.executable, "-c", code)
    found = re.findall(r"^\[\d\] (/dev/shm/hvdkit-mpi-\S+) True$", done.stdout, re.MULTILINE)
    assert len(found) == 2, done.stdout + done.stderr
    assert not Path(found[0]).exists()


def test_torchs_variables_can_be_left_out():
    names = "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')"
    code = python(f"print([name for name in {names} if name in os.environ])")
    assert run("-np", "1", "--no-torch-env", *code).stdout == "[0] []\n"
    assert run("-np", "1", *code).stdout.count("'") == 10


def test_variables_from_a_file_and_by_their_beginning(tmp_path):
    (tmp_path / "env").write_text("# comment\n\nA=x y\nB\nMY_1=other\n")
    how = ("--env-file", str(tmp_path / "env"), "-x", "MY_*")
    code = python("print(*map(os.environ.get, ('A', 'B', 'MY_1')), sep='|')")
    done = run("-np", "1", *how, *code, env=os.environ | {"B": "here", "MY_1": "mine"})
    assert done.stdout == "[0] x y|here|mine\n", done.stderr


def test_an_invalid_line_is_not_shown(tmp_path):
    (tmp_path / "env").write_text("\ufeffA=1\n\nmy-token=hunter2\n")
    done = run("-np", "1", "--env-file", str(tmp_path / "env"), "true")
    assert done.returncode == 2
    assert f"--env-file {tmp_path}/env, line 3: expected NAME=VALUE or NAME" in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_streams(closed):
    number = {"stdout": 1, "stderr": 2}[closed]
    line = shlex.join(command("-np", "2", *python("print('out'); print('err', file=sys.stderr)")))
    done = subprocess.run(
        ["bash", "-c", f"{line} {number}>&-"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    other = {"stdout": done.stderr, "stderr": done.stdout}[closed]
    word = {"stdout": "err", "stderr": "out"}[closed]
    assert sorted(other.splitlines()) == [f"[0] {word}", f"[1] {word}"]


def test_messages_are_not_written_to_a_file_in_place_of_a_closed_stream(tmp_path):
    code = python(
        "print('up'); os.kill(int(os.environ['LAUNCHER']), signal.SIGTERM); time.sleep(60)"
    )
    line = shlex.join(command("--output-dir", str(tmp_path), "-np", "1", *code))
    done = subprocess.run(["bash", "-c", f"LAUNCHER=$$ exec {line} <&- 2>&-"], timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "latest" / "rank.0.log").read_text() == "up\n"


def test_a_port_for_torch_may_be_chosen():
    code = python("print(os.environ['MASTER_PORT'])")
    assert run("-np", "1", "-x", "MASTER_PORT=29512", *code).stdout == "[0] 29512\n"


def test_a_helper_process_is_not_a_rank_that_did_not_stop():
    left = "(trap '' TERM; sleep 4; sleep 4) & exit 75"
    done = run("--stop-grace", "1", "-np", "1", "bash", "-c", left)
    assert done.returncode == 75
    assert "did not stop" not in done.stderr


def test_a_restart_uses_a_host_of_the_user_that_had_no_ranks():
    hosts = ("-np", "2", "-H", "localhost:2,127.0.0.1:2")
    code = "print(os.environ['HOROVOD_HOSTNAME'], flush=True); sys.exit(1)"
    done = run(*hosts, "--restarts", "2", "--min-np", "1", *python(code))
    assert done.returncode == 1
    assert "left out, because the job failed there 2 times: localhost" in done.stderr
    assert "127.0.0.1" in done.stdout


def test_a_script_alone_is_run_with_python(tmp_path):
    (tmp_path / "executable.py").write_text("print('run')")
    (tmp_path / "executable.py").chmod(0o755)
    assert run("-np", "1", "./executable.py", cwd=tmp_path).stdout == "[0] run\n"
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    assert run("-np", "1", "train.py", "-x", cwd=tmp_path).stdout == "[0] ['-x']\n"
    missing = run("-np", "1", "gone.py", cwd=tmp_path)
    assert missing.returncode == 2
    assert f"there is no file gone.py in {tmp_path}" in missing.stderr


def test_standard_output_and_error_stay_apart():
    done = run("-np", "1", *python("print('out'); print('err', file=sys.stderr)"))
    assert (done.stdout, done.stderr) == ("[0] out\n", "[0] err\n")


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("sys.exit(3) if rank else time.sleep(60)", 3, "rank 1 on localhost failed: exit status 3"),
        ("os.kill(os.getpid(), 11) if rank else time.sleep(60)", 139, "Segmentation fault"),
        ("sys.exit(75) if rank else time.sleep(1)", 75, "start the job again to resume it"),
        # A failure takes precedence over an orderly stop.
        ("time.sleep(1 - rank); sys.exit(75 if rank else 3)", 3, "exit status 3"),
    ],
)
def test_the_exit_status_is_that_of_the_rank_that_failed(code, status, expected):
    done = run("-np", "2", *python(code))
    assert done.returncode == status
    assert expected in done.stderr


# The class of Horovod's error, which a script need not import from hvdkit.
LOST = """
class HorovodInternalError(RuntimeError):
    __module__ = "horovod.common.exceptions"
"""


@pytest.mark.parametrize("how", ["raise", "sys.exit(4)", "raise KeyError(0)"])
@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_the_rank_that_others_have_lost_is_the_cause(seconds, how):
    """The rank that fails ends after the ranks that lost it. None of them imports hvdkit."""
    code = f"""
{LOST}
lost = HorovodInternalError("Horovod has been shut down")
if rank != 2:
  try: raise lost
  except RuntimeError: {how}
time.sleep({seconds}); print('ValueError: bad data', file=sys.stderr); sys.exit(7)
"""
    done = run("-np", "4", *python(code))
    assert done.returncode == 7
    report = done.stderr[done.stderr.index("hvdkit run:") :]
    assert report.startswith(
        "hvdkit run: rank 2 on localhost failed: exit status 7; 3 ranks failed"
    )
    assert "ValueError: bad data" in report
    assert "HorovodInternalError" not in report


def test_a_rank_reports_an_error_of_its_script_and_its_programs_do_not(tmp_path):
    """The report needs nothing from the script, and other programs see no variable of it."""
    (tmp_path / "bad.py").write_text("def f(:\n")
    done = run("-np", "1", sys.executable, str(tmp_path / "bad.py"))
    assert "Rank 0's last lines:" in done.stderr
    assert "SyntaxError" in done.stderr
    child = "import os, sys; print([p for p in sys.path if 'hook' in p and 'hvdkit/' in p])"
    code = f"import subprocess; subprocess.run([sys.executable, '-c', {child!r}])"
    done = run("-np", "1", *python(f"{code}; print(os.environ.get('PYTHONPATH'))"))
    expected = os.environ.get("PYTHONPATH")
    assert done.stdout == f"[0] []\n[0] {expected}\n"


def test_the_stack_of_a_crash_is_shown():
    code = "import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()"
    done = run("-np", "1", *python(code))
    assert done.returncode == 128 + signal.SIGSEGV
    assert "Its stack:" in done.stderr
    assert "in crash" in done.stderr


def test_the_rank_that_raised_is_the_cause_in_a_real_job():
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    code = (
        "import torch, hvdkit.torch as hvd; hvd.init(); hvd.allreduce(torch.ones(1));"
        "raise_(ValueError('bad data')) if rank == 1 else hvd.allreduce(torch.ones(1))"
    )
    raising = "\ndef raise_(error): raise error\n"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run("-np", "2", sys.executable, "-c", RANK + raising + code, env=env)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("hvdkit run:") :]
    assert report.startswith("hvdkit run: rank 1 on localhost failed: exit status 1")
    assert "ValueError: bad data" in report


def signalled(number, handles):
    """Send a signal to a launcher of two ranks. Return its exit status and its standard error.

    Args:
        number: the signal.
        handles: the statement with which the ranks set their signal handler.
    """
    code = f"{handles}; print('up', flush=True); time.sleep(60)"
    job = subprocess.Popen(
        command("-np", "2", "--stop-grace", "1", *python(code)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout
    assert {job.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
    job.send_signal(number)
    _, stderr = job.communicate(timeout=60)
    return job.returncode, stderr


def test_sigusr2_does_not_end_a_launcher():
    """A batch system may send it to all processes, for scripts that handle it."""
    code = "print(signal.getsignal(signal.SIGUSR2).name, flush=True); time.sleep(1)"
    with subprocess.Popen(
        command("-np", "1", *python(code)), stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout.readline() == "[0] SIG_DFL\n"
        job.send_signal(signal.SIGUSR2)
    assert job.returncode == 0


def test_ranks_that_ignore_ctrl_c_end_with_its_status():
    status, stderr = signalled(signal.SIGINT, "signal.signal(2, signal.SIG_IGN)")
    assert status == 130, stderr
    assert "did not stop within 1 s (--stop-grace)" in stderr


def test_a_rank_that_has_stopped_does_not_interrupt_one_that_is_saving():
    code = "time.sleep(0 if rank else 2); print('saved', rank); sys.exit(75)"
    done = run("-np", "2", *python(code))
    assert done.returncode == 75
    assert "saved 0" in done.stdout


def test_an_orderly_stop_has_a_timeout():
    done = run("-np", "2", "--stop-grace", "1", *python("sys.exit(75) if rank else time.sleep(60)"))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "hvdkit run: only rank 1 on localhost made an orderly stop (exit status 75)",
        "rank 0 on localhost did not stop within 1 s (--stop-grace). Give a longer time if saving "
        "needs it",
    ]


def test_a_job_that_has_saved_can_be_resumed_although_its_processes_do_not_end(tmp_path):
    """Python waits for a thread of rank 0, and for a child process of rank 1."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    (tmp_path / "train.py").write_text(
        "import multiprocessing, threading, time, torch, hvdkit.torch as hvd\n"
        "hvd.init()\n"
        "start = multiprocessing.get_context('fork').Process if hvd.rank() else threading.Thread\n"
        "start(target=time.sleep, args=(60,)).start()\n"
        "torch.manual_seed(0)\n"
        "with hvd.Checkpointer('saved', model=torch.nn.Linear(1, 1)) as checkpointer:\n"
        "    checkpointer.save_and_stop(1)\n"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run("-np", "2", "--stop-grace", "1", "train.py", env=env, cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    report = done.stderr[done.stderr.index("hvdkit run: ") :]
    assert report.startswith(
        "hvdkit run: ranks 0 on localhost, 1 on localhost had reached the end of the script, but "
        "their processes did not end within 1 s (--stop-grace), so the launcher ended them."
    )
    assert report.endswith("stopped; start the job again to resume it (exit status 75)\n")


def test_a_job_with_a_rank_that_ignores_sigterm_is_not_resumable():
    handler = "signal.SIG_IGN if rank else lambda *_: sys.exit(75)"
    status, stderr = signalled(signal.SIGTERM, f"signal.signal(15, {handler})")
    assert status == 128 + signal.SIGTERM, stderr
    assert "ended by SIGTERM; only rank 0 on localhost made an orderly stop" in stderr
    assert "start the job again" not in stderr


def test_sigterm_is_an_orderly_stop():
    code = "signal.signal(15, lambda *_: sys.exit(75)); print('up'); time.sleep(60)"
    job = subprocess.Popen(command("-np", "1", *python(code)), stdout=subprocess.PIPE)
    try:
        assert job.stdout.readline() == b"[0] up\n"
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=20) == 75
    finally:
        job.kill()
        job.wait(timeout=20)
        job.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(15, marks=pytest.mark.long)])
def test_a_job_ends_although_its_output_is_not_read(number, tmp_path):
    """The reader is like `less`. After a second Ctrl-C, the launcher does not wait for it."""
    code = (
        "stop = lambda *_: (open('stopped', 'w'), os._exit(75));"
        "signal.signal(2, stop); signal.signal(15, stop);"
        "print('up', flush=True); [os.write(1, bytes(99) + bytes([10])) for _ in range(10**9)]"
    )
    job = subprocess.Popen(
        command("-np", "1", *python(code)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    )
    try:
        assert job.stdout.readline() == b"[0] up\n"
        time.sleep(1)  # until the pipe is full
        job.send_signal(number)
        deadline = time.monotonic() + 20
        while not (tmp_path / "stopped").exists():
            assert time.monotonic() < deadline, "the rank got no signal"
            time.sleep(0.05)
        if number == signal.SIGINT:
            time.sleep(0.6)  # otherwise, it counts as the first Ctrl-C
            job.send_signal(number)
        assert job.wait(timeout=30) == 75  # the rank has saved, before a second signal
    finally:
        job.kill()
        job.wait(timeout=20)
        job.stdout.close()


def test_a_hangup_that_is_ignored_stays_ignored():
    code = "print('up'); time.sleep(1); print('done')"
    job = subprocess.Popen(["nohup", *command("-np", "1", *python(code))], stdout=subprocess.PIPE)
    try:
        assert job.stdout.readline() == b"[0] up\n"
        job.send_signal(signal.SIGHUP)
        assert job.stdout.readline() == b"[0] done\n"
        assert job.wait(timeout=20) == 0
    finally:
        job.kill()
        job.wait(timeout=20)
        job.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_the_status_is_that_of_the_first_signal(number):
    """Ranks get SIGTERM for SIGHUP, and may die of a later SIGTERM."""
    code = "signal.signal(signal.SIGUSR1, lambda *_: None); print('up'); time.sleep(20)"
    job = subprocess.Popen(
        command("-np", "1", *python(code)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert job.stdout.readline() == b"[0] up\n"
        job.send_signal(number)
        if number == signal.SIGUSR1:
            assert b"asking all ranks to stop" in job.stderr.readline()
            job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=20) == 128 + number
        assert f"ended by {number.name}".encode() in job.stderr.read()
    finally:
        job.kill()
        job.wait(timeout=20)
        job.stdout.close()
        job.stderr.close()


@pytest.mark.parametrize("asked", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_may_save_after_the_reader_of_their_output_has_ended(tmp_path, asked):
    """Ctrl-C also ends the reader, for example `tee`."""
    code = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {2, 15});"
        "print('up', flush=True); signal.sigwait({2, 15});"
        "print('saving', flush=True); time.sleep(11); open(f'saved.{rank}', 'w'); sys.exit(75)"
    )
    if not asked:
        code = code.replace("signal.sigwait({2, 15});", "")
    job = subprocess.Popen(
        command("-np", "2", *python(code)),
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    try:
        lines = {job.stdout.readline() for _ in range(2)}
        assert lines == {b"[0] up\n", b"[1] up\n"} or not asked
        job.stdout.close()
        if asked:
            job.send_signal(signal.SIGINT)
        assert job.wait(timeout=40) == 75
    finally:
        job.kill()
        job.wait(timeout=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved.0", "saved.1"]


@pytest.mark.parametrize("sink", ["file", "stdout"])
def test_a_full_disk_does_not_end_the_job(tmp_path, sink):
    code = "print('x' * 100_000, flush=True); time.sleep(0.5); print('done', file=sys.stderr)"
    chosen = ("--output-dir", str(tmp_path / "logs")) if sink == "file" else ()
    limit = ("prlimit", "--fsize=50000") if sink == "file" else ()
    reason = "File too large" if sink == "file" else "No space left on device"
    stdout = subprocess.PIPE if sink == "file" else open("/dev/full", "wb")  # noqa: SIM115
    done = subprocess.run(
        [*limit, *command("-np", "2", *chosen, *python(code))],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    if sink == "stdout":
        stdout.close()
    assert done.returncode == 0, done.stderr
    assert {"[0] done", "[1] done"} <= set(done.stderr.splitlines())
    assert done.stderr.count(reason) == 1
    assert "Traceback" not in done.stderr
    if sink == "file":
        assert done.stdout.count("x" * 100_000) == 2


def test_a_closed_pipe_ends_the_job():
    job = subprocess.Popen(
        command("-np", "2", "yes"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        job.stdout.read(10)
        job.stdout.close()
        assert job.wait(timeout=20) == 128 + signal.SIGPIPE
        assert job.stderr.read() == b""
    finally:
        job.kill()
        job.wait(timeout=20)
        job.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-np", "0", "true"], "-np is 0; expected at least 1"),
        (["--start-timeout", "inf", "true"], "'inf': expected a number of seconds above 0"),
        (["--stop-grace", "-1", "true"], "'-1': expected a number of seconds above 0"),
        (["-np", "many", "true"], "'many' is not a number; expected a number, or auto"),
        (["-np", "1", "--env-file", "/nonexistent", "true"], "--env-file /nonexistent: No such"),
        (
            ["-np", "1", "-x", "NOT_HERE_*", "true"],
            "-x NOT_HERE_*: no variable here has this prefix",
        ),
        (["-np", "2"], "there is no command to run"),
        (["-np", "0", "true"], "-np is 0"),
        (["-np", "3", "-H", "localhost:2", "true"], "the hosts have 2 slots"),
        (["-H", "a:1", "--hostfile", "b", "true"], "not allowed with"),
        (["-np", "1", "-x", "NOT_SET_ANYWHERE", "true"], "is not set here"),
        (["-np", "1", "--launcher", "pbs", "true"], "invalid choice: 'pbs'"),
        (["-np", "1", "--launcher", "mpi", "--mpi-args", "'a", "true"], "No closing quotation"),
        (["-np", "1", "--launcher", "gloo", "--mpi-args=-v", "true"], "needs --launcher mpi"),
    ],
)
def test_wrong_arguments_are_status_2(arguments, expected):
    done = run(*arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_time_limit_may_be_longer_than_the_system_can_wait():
    options = [word for name in ("start-timeout", "stop-grace") for word in (f"--{name}", "1e300")]
    done = run("-np", "1", *options, "true")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_program_is_reported_before_the_start():
    done = run("-np", "2", "no-such-program")
    assert done.returncode == 1
    assert done.stderr == (
        "hvdkit run: localhost: no program 'no-such-program' on PATH; install it, or give its "
        "full path\n"
    )


def test_the_commands_of_a_dry_run_work(tmp_path):
    done = run("-np", "2", "--dry-run", *python("open(f'made.{rank}', 'w')"), cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    ranks = [line for line in done.stdout.splitlines() if " HOROVOD_RANK=" in line]
    assert len(ranks) == 2
    for line in ranks:
        subprocess.run(line.removesuffix("&"), shell=True, timeout=30, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.0", "made.1"]


@pytest.mark.parametrize(
    ("value", "arguments", "refused"),
    [
        ("1", [], True),
        ("0", ["-x", "HVDKIT_SHARE_GPUS=1"], True),
        ("1", ["-x", "HVDKIT_SHARE_GPUS=0"], False),
    ],
)
def test_pinned_gpus_cannot_be_shared(value, arguments, refused, monkeypatch, capsys):
    monkeypatch.setenv("HVDKIT_SHARE_GPUS", value)
    status = cli.main(["run", "--pin-gpus", *arguments, "--dry-run", "-np", "1", "true"])
    assert status == (2 if refused else 0)
    assert ("Remove one of them" in capsys.readouterr().err) == refused
