"""`hvdkit run` on this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdkit import cli
from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.unit.launch.commands import execute, python, run, started, started_command, wait_until

HVDKIT_RUN = (sys.executable, "-m", "hvdkit", "run")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def of_shell(line, *words, **options):
    """Run `hvdkit run` as `"$@"` in a line of a shell."""
    return execute(["bash", "-c", line, "-", *HVDKIT_RUN, *words], **options)


# The environment, the output and the number of ranks


@pytest.mark.parametrize("comm", ["MPI.COMM_WORLD.Split(half)", "[2 * half, 2 * half + 1]"])
@pytest.mark.long
def test_two_jobs_inside_one_mpirun(comm):
    skip_where_unsupported(Configuration("torch", "mpi", 4))
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
    places = ["0 0 2 1.0", "0 1 2 1.0", "1 0 2 5.0", "1 1 2 5.0"]
    lines = [f"[{rank}] {place}" for rank, place in enumerate(places)]
    assert sorted(done.stdout.splitlines()) == lines, done.stderr


def test_the_environment_of_a_rank(tmp_path):
    # A module that shadows one of Python's own must not affect the launcher.
    (tmp_path / "selectors.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "env").write_text("# comment\n\nA=x y\nB\nMY_1=other\n")
    given = ("--env-file", tmp_path / "env", "-x", "MY_*", "-x", "MASTER_PORT=29512")
    names = "('GREETING', 'A', 'B', 'MY_1', 'MASTER_PORT')"
    code = f"print(os.getcwd(), *map(os.environ.get, {names}), sep='|'); print(sys.argv[1:])"
    # PYTHONSAFEPATH makes `-m hvdkit` behave like the installed command `hvdkit`.
    env = {"GREETING": "hello", "PYTHONSAFEPATH": "1", "B": "here", "MY_1": "mine"}
    words = ("-np", "1", *given, "--", *python(code), "-np", "3", "--help")
    done = run(*words, cwd=tmp_path, env=os.environ | env)
    line = f"[0] {tmp_path}|hello|x y|here|mine|29512\n"
    assert done.stdout == f"{line}[0] ['-np', '3', '--help']\n", done.stderr


def test_a_working_directory_that_was_deleted(tmp_path):
    env = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONSAFEPATH": "1"}
    line = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    done = of_shell(line, "-np", "1", "true", cwd=tmp_path, env=env)
    assert done.returncode == 2, done.stderr
    named = f"hvdkit run: the working directory {tmp_path}/gone does not exist any more"
    assert done.stderr.startswith(named)


@pytest.mark.parametrize(
    ("arguments", "env", "ranks", "said"),
    [
        ("", {"CUDA_VISIBLE_DEVICES": "4,7"}, 2, "2 ranks, one for each GPU"),
        ("-np auto", {"CUDA_VISIBLE_DEVICES": "4,7"}, 2, "2 ranks, one for each GPU"),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, 1, "1 rank, because there is no GPU here; -np N star"),
        ("-np 3", {"CUDA_VISIBLE_DEVICES": "4,7"}, 3, ""),
        ("-H localhost:2", {"CUDA_VISIBLE_DEVICES": "4"}, 2, ""),
        ("", {"LSB_MCPU_HOSTS": "localhost 3"}, 3, "the hosts of LSB_MCPU_HOSTS: localhost:3"),
    ],
)
def test_the_number_of_ranks(arguments, env, ranks, said, monkeypatch, capfd):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "--dry-run", *arguments.split(), "true"]) == 0
    shown = capfd.readouterr()
    assert shown.out.count(" HOROVOD_RANK=") == ranks
    assert said in shown.err
    assert bool(said) == bool(shown.err)


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
    env = ONE_THREAD | {"RANK": "5", "GLOBAL_RANK": "5", "NNODES": "9"}
    how = ("--launcher", launcher, "-np", "2")
    done = run(*how, sys.executable, "-c", TORCH_ENV, env=env)
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] True 2 2.0 5.0 {rank} 2 0 1 0 {rank} 1" for rank in range(2)
    ], done.stderr


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_streams(closed):
    code = python("print('out'); print('err', file=sys.stderr)")
    done = of_shell(f'exec "$@" {closed}>&-', "-np", "2", *code)
    assert done.returncode == 0, done.stderr
    streams = {1: (done.stdout, "out"), 2: (done.stderr, "err")}
    for text, word in (shown for number, shown in streams.items() if number != closed):
        assert sorted(text.splitlines()) == [f"[0] {word}", f"[1] {word}"]


def test_messages_are_not_written_to_a_file_in_place_of_a_closed_stream(tmp_path):
    code = "print('up'); os.kill(int(os.environ['LAUNCHER']), signal.SIGTERM); time.sleep(60)"
    line = 'LAUNCHER=$$ exec "$@" <&- 2>&-'
    done = of_shell(line, "--output-dir", str(tmp_path), "-np", "1", *python(code))
    assert done.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "latest" / "rank.0.log").read_text() == "up\n"


def test_a_script_alone_is_run_with_python(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "executable.py").touch(0o755)
    (tmp_path / "train.py").touch()
    for words in ("./executable.py", "train.py -x"):
        assert cli.main(["run", "-np", "1", "--dry-run", *words.split()]) == 0
        assert capfd.readouterr().out.endswith(f" {sys.executable} {words}\n")
    assert cli.main(["run", "-np", "1", "gone.py"]) == 2
    assert f"there is no file gone.py in {tmp_path}" in capfd.readouterr().err


def test_a_time_limit_may_be_longer_than_the_system_can_wait():
    done = run("-np", "1", "--start-timeout", "1e300", "--stop-grace", "1e300", "true")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_of_a_dry_run_work(tmp_path):
    done = run("-np", "2", "--dry-run", *python("open(f'made.{rank}', 'w')"), cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    ranks = [line for line in done.stdout.splitlines() if " HOROVOD_RANK=" in line]
    assert len(ranks) == 2
    for line in ranks:
        subprocess.run(line, shell=True, timeout=30, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.0", "made.1"]


# The memory and the programs of MPI

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


# Failures


@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_ranks_that_wait_for_a_rank_that_has_ended_do_not_wait_for_long(launcher):
    """Over Gloo, the engine ends the job. Over MPI, the launcher gives a verdict."""
    skip_where_unsupported(Configuration("torch", launcher, 2))
    code = (
        "import os, torch, hvdkit.torch as hvd\n"
        "hvd.init()\n"
        "hvd.allreduce(torch.ones(1), name='a')\n"
        "if hvd.rank() == 1: os._exit(0)\n"
        "hvd.allreduce(torch.ones(1), name='b')"
    )
    env = ONE_THREAD | {"HVDKIT_STALL_TIMEOUT": "3"}
    done = run("--launcher", launcher, "-np", "2", sys.executable, "-c", code, env=env)
    assert done.returncode == 1
    found = {
        "gloo": "had ended without an error",
        "mpi": "has not called it: the process has ended",
    }
    assert f"Rank 1 on localhost {found[launcher]}" in done.stderr


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("sys.exit(3) if rank else time.sleep(60)", 3, "rank 1 on localhost failed: exit status 3"),
        # A rank that has stopped does not interrupt one that may save.
        ("sys.exit(75) if rank else (time.sleep(1), sys.exit(75))", 75, "to resume it"),
        ("import ctypes\ndef crash(): ctypes.string_at(0)\nrank and crash()", 139, " in crash"),
        # A helper process is not a rank that did not stop.
        (
            "if rank == 0 and not os.fork(): signal.signal(15, signal.SIG_IGN); time.sleep(3)\n"
            "sys.exit(75)",
            75,
            "hvdkit run: stopped; start the job again",
        ),
    ],
)
def test_the_exit_status_is_that_of_the_rank_that_failed(code, status, expected):
    done = run("-np", "2", "--stop-grace", "2", *python(f"\n{code}"))
    assert done.returncode == status
    assert expected in done.stderr


def test_the_rank_that_raised_is_the_cause_in_a_real_job():
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    code = (
        "\nimport torch, hvdkit.torch as hvd\n"
        "hvd.init(); hvd.allreduce(torch.ones(1))\n"
        "if rank == 1: raise ValueError('bad data')\n"
        "hvd.allreduce(torch.ones(1))"
    )
    done = run("-np", "2", *python(code), env=ONE_THREAD)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("hvdkit run:") :]
    assert report.startswith("hvdkit run: rank 1 on localhost failed: exit status 1")
    assert "ValueError: bad data" in report


def test_a_rank_reports_an_error_of_its_script_and_its_programs_do_not(tmp_path):
    """The report needs nothing from the script, and other programs see no variable of it."""
    (tmp_path / "bad.py").write_text("def f(:\n")
    done = run("-np", "1", sys.executable, str(tmp_path / "bad.py"))
    assert "Rank 0's last lines:" in done.stderr
    assert "SyntaxError" in done.stderr
    child = "import os, sys; print([p for p in sys.path if 'hook' in p and 'hvdkit/' in p])"
    code = f"import subprocess; subprocess.run([sys.executable, '-c', {child!r}])"
    done = run("-np", "1", *python(f"{code}; print(os.environ.get('PYTHONPATH'))"))
    assert done.stdout == f"[0] []\n[0] {os.environ.get('PYTHONPATH')}\n"


def test_a_restart_uses_a_host_of_the_user_that_had_no_ranks():
    hosts = ("-np", "2", "-H", "localhost:2,127.0.0.1:2", "--restarts", "2", "--min-np", "1")
    code = "print(os.environ['HOROVOD_HOSTNAME'], flush=True); sys.exit(1)"
    done = run(*hosts, *python(code))
    assert done.returncode == 1
    assert "left out, because the job failed there 2 times: localhost" in done.stderr
    assert "127.0.0.1" in done.stdout


# Signals and orderly stops

SAVES = "signal.signal(15, lambda *_: sys.exit(75))"
# Only the second SIGTERM ends the rank.
LATE = "signal.signal(15, lambda *_: signal.signal(15, signal.SIG_DFL))"


@pytest.mark.parametrize(
    ("signals", "handler", "status", "said"),
    [
        # One rank saves, and the other does not stop: the job is not resumable.
        ([signal.SIGTERM], f"{LATE} if rank else {SAVES}", 143, "ended by SIGTERM; only rank 0 on"),
        # Ranks get SIGTERM for SIGHUP, and may die of a later SIGTERM.
        ([signal.SIGHUP], "0", 128 + signal.SIGHUP, "ended by SIGHUP"),
        ([signal.SIGUSR1, signal.SIGTERM], "signal.signal(10, print)", 138, "ended by SIGUSR1"),
        # A batch system may send it to all processes, for scripts that handle it.
        ([signal.SIGUSR2], "assert not signal.getsignal(signal.SIGUSR2)", 0, ""),
    ],
)
def test_a_signal_to_the_launcher(signals, handler, status, said):
    wait = "1" if signals == [signal.SIGUSR2] else "60"
    code = f"{handler}; print('up', flush=True); time.sleep({wait})"
    with started("-np", "2", "--stop-grace", "1", *python(code)) as job:
        assert {job.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
        shown = ""
        for number in signals:
            job.send_signal(number)
            shown += job.stderr.readline() if len(signals) > 1 else ""
        shown += job.communicate(timeout=600)[1]
    assert job.returncode == status, shown
    assert said in shown
    assert ("start the job again" in shown) == (status == 75)


def test_a_hangup_that_is_ignored_stays_ignored():
    code = python("print('up'); time.sleep(1); print('done')")
    with started_command("nohup", *HVDKIT_RUN, "-np", "1", *code) as job:
        assert job.stdout.readline() == "[0] up\n"
        job.send_signal(signal.SIGHUP)
        assert job.stdout.readline() == "[0] done\n"
        assert job.wait(timeout=600) == 0


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
    done = run("-np", "2", "--stop-grace", "4", "train.py", env=ONE_THREAD, cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    report = done.stderr[done.stderr.index("hvdkit run: ") :]
    assert report.startswith(
        "hvdkit run: ranks 0 on localhost, 1 on localhost had reached the end of the script, but "
        "their processes did not end within 4 s (--stop-grace), so the launcher ended them."
    )
    assert report.endswith("stopped; start the job again to resume it (exit status 75)\n")


# Readers of the output that do not read, or have ended, and full disks


def test_a_job_ends_although_its_output_is_not_read(tmp_path):
    """The reader is like `less`. After a second Ctrl-C, the launcher does not wait for it."""
    code = (
        "stop = lambda *_: (open('stopped', 'w'), os._exit(75));"
        "signal.signal(2, stop); signal.signal(15, stop);"
        "print('up', flush=True); os.set_blocking(1, False)\n"
        "while True:\n"
        "  try: os.write(1, bytes(99) + bytes([10]))\n"
        "  except BlockingIOError: open('full', 'w'); time.sleep(0.01)"
    )
    with started("-np", "1", *python(code), stderr=subprocess.STDOUT, cwd=tmp_path) as job:
        assert job.stdout.readline() == "[0] up\n"
        wait_until((tmp_path / "full").exists)
        job.send_signal(signal.SIGINT)
        wait_until((tmp_path / "stopped").exists)
        time.sleep(0.6)  # otherwise, it counts as the first Ctrl-C
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=600) == 75  # the rank has saved, before a second signal


@pytest.mark.parametrize("asked", [False, True])
def test_ranks_may_save_after_the_reader_of_their_output_has_ended(tmp_path, asked):
    """Ctrl-C also ends the reader, for example `tee`."""
    code = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {2, 15}); print('up', flush=True)\n"
        "for _ in range(9): asked or (print('step', flush=True), time.sleep(0.1))\n"
        "signal.sigwait({2, 15}); print('saving', flush=True)\n"
        # The launcher ends the ranks with SIGTERM.
        "if not signal.sigtimedwait({15}, 3): open(f'saved.{rank}', 'w'); sys.exit(75)"
    )
    with started("-np", "2", *python(f"asked = {asked}\n{code}"), cwd=tmp_path) as job:
        lines = {job.stdout.readline() for _ in range(2)}
        assert lines == {"[0] up\n", "[1] up\n"} or not asked
        job.stdout.close()
        if asked:
            job.send_signal(signal.SIGINT)
        assert job.wait(timeout=600) == 75
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved.0", "saved.1"]


@pytest.mark.parametrize("sink", ["file", "stdout"])
def test_a_full_disk_does_not_end_the_job(tmp_path, sink):
    code = python("print('x' * 100_000, flush=True); print('done', file=sys.stderr)")
    if sink == "file":
        folder = ("--output-dir", str(tmp_path / "logs"))
        limited = ["prlimit", "--fsize=50000", *HVDKIT_RUN, "-np", "2", *folder]
        done, reason = execute([*limited, *code]), "File too large"
        assert done.stdout.count("x" * 100_000) == 2
    else:
        with open("/dev/full", "wb") as full:
            done = run("-np", "2", *code, capture_output=False, stdout=full, stderr=-1)
        reason = "No space left on device"
    assert done.returncode == 0, done.stderr
    assert {"[0] done", "[1] done"} <= set(done.stderr.splitlines())
    assert done.stderr.count(reason) == 1
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_ends_the_job():
    with started("-np", "2", "yes") as job:
        job.stdout.read(10)
        job.stdout.close()
        assert job.wait(timeout=600) == 128 + signal.SIGPIPE
        assert job.stderr.read() == ""
