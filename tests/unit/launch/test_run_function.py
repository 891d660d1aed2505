"""`hvdkit.run(function)`: ranks call a function of a script, and the script gets their results."""

import atexit
import inspect
import os
import pickle
import re
import shutil
import signal
import sys

import psutil
import pytest

import hvdkit
from hvdkit.engine.describe import installed
from hvdkit.errors import HvdkitError, UsageError
from tests.unit.launch.commands import execute, started_command, wait_until

pytestmark = pytest.mark.skipif(installed() is None, reason="no Horovod here: run `hvdkit build`")

#: A rank prints the addresses at which the processes of its job listen.
LISTENERS = """
import os, psutil, hvdkit
def listeners():
    job = psutil.Process(caller).children(recursive=True)
    return [c.laddr.ip for p in [psutil.Process(caller), *job] for c in p.net_connections("inet")
            if c.status == "LISTEN"]
def slow():
    import time, hvdkit.torch as hvd
    hvd.init()
    time.sleep(1)
    return listeners()
caller = os.getpid()
for found in hvdkit.run(slow, num_proc=2):
    print("LISTENING", *found)
"""
TORCH = """
import torch, hvdkit
def train(value, *, factor):
    import hvdkit.torch as hvd
    hvd.init()
    total = hvd.allreduce(torch.full((3,), value * (hvd.rank() + 1.0)), op=hvd.Sum)
    return hvd.rank(), hvd.size(), factor * total
print("RESULTS", hvdkit.run(train, (2.0,), {"factor": 10}, num_proc=2))
"""
SLEEP = """
import os, sys, time, hvdkit
def sleep(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(300)
hvdkit.run(sleep, sys.argv[1:], num_proc=2)
"""


def rank():
    return int(os.environ["HOROVOD_RANK"])


def run(function, *arguments, **options):
    return hvdkit.run(function, arguments, num_proc=2, **options)


def script(path, code):
    (path / "script.py").write_text(code)
    return [sys.executable, path / "script.py"]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The temporary folders of a run are removed."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    assert not list(folder.glob("hvdkit-run*"))


def test_the_arguments_are_horovods():
    import horovod

    ours, horovods = (inspect.signature(each).parameters for each in (hvdkit.run, horovod.run))
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in horovods.values()
    ]


def test_results_are_in_the_order_of_the_ranks():
    assert run(lambda *values: (rank(), values), 1, "two") == [(0, (1, "two")), (1, (1, "two"))]


def test_a_function_of_a_script_with_torch(tmp_path):
    done = execute(script(tmp_path, TORCH))
    expected = "[(0, 2, tensor([60., 60., 60.])), (1, 2, tensor([60., 60., 60.]))]"
    assert f"RESULTS {expected}" in done.stdout, done.stderr


def test_a_function_of_a_module_beside_the_script(tmp_path):
    (tmp_path / "beside.py").write_text("def f(): return __name__")
    code = "import beside, hvdkit; print('RESULTS', hvdkit.run(beside.f, num_proc=2))"
    done = execute(script(tmp_path, code), cwd="/")
    assert "RESULTS ['beside', 'beside']" in done.stdout, done.stderr


def test_only_this_machine_can_reach_a_job(tmp_path):
    found = re.findall("^LISTENING(.*)", execute(script(tmp_path, LISTENERS)).stdout, re.MULTILINE)
    addresses = {address for line in found for address in line.split()}
    assert len(found) == 2
    assert addresses <= {"127.0.0.1"}


def test_a_function_that_raises_an_error(capfd):
    def fail():
        if rank() == 1:
            raise ValueError("no such sample")

    with pytest.raises(HvdkitError, match=r"(?s)status 1.*rank 1.*no such sample") as error:
        run(fail)
    assert not isinstance(error.value, UsageError)
    shown = capfd.readouterr().err
    assert "no such sample" in shown
    assert "rank 1 on localhost failed" in shown


def test_a_rank_that_ends_without_a_result():
    with pytest.raises(HvdkitError, match="rank 1 ended without a result"):
        run(lambda: sys.exit(0) if rank() else 1)


def test_a_function_or_a_result_that_cannot_be_pickled():
    lock = psutil.threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be pickled: .*lock"):
        run(lambda: lock)
    with pytest.raises(HvdkitError, match=r"result of rank \d, a generator, cannot be pickled"):
        run(lambda: (each for each in []))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_np": 1}, "min_num_proc .*`hvdkit run --elastic`"),
        ({"max_num_proc": 4}, "max_num_proc .*`hvdkit run --elastic`"),
        ({"host_discovery_script": "x"}, "host_discovery_script .*`hvdkit run --elastic`"),
        ({"reset_limit": 0}, "reset_limit .*`hvdkit run --elastic`"),
        ({"hosts": "other.invalid:2"}, "other.invalid .*`hvdkit run`"),
        ({"hosts": "localhost:1"}, "1 slot"),
        ({"hosts": "localhost:2", "hostfile": "x"}, "hosts and hostfile"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo and use_mpi"),
        ({"num_proc": 0}, "num_proc is 0: expected"),
        ({"num_proc": "2"}, "num_proc is '2': expected"),
        ({"start_timeout": "soon"}, "start-timeout"),
        ({"executable": "/none"}, "/none"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(HvdkitError, match=message):
        hvdkit.run(rank, **{"num_proc": 2} | options)


def test_hosts_that_are_this_machine(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    assert run(rank, hosts="127.0.0.1:2") == [0, 1]
    assert run(rank, hostfile=str(tmp_path / "hosts")) == [0, 1]


def test_options_for_the_launcher(tmp_path, capfd):
    options = {"ssh_port": 22, "ssh_identity_file": "id", "start_timeout": 60, "verbose": 1}
    found = run(
        lambda: print("a line") or sys.executable,
        output_filename=tmp_path / "logs",
        executable=sys.executable,
        network_interfaces=["lo"],
        disable_cache=True,
        use_gloo=True,
        **options,
    )
    assert found == [sys.executable] * 2
    assert (tmp_path / "logs/rank.1/stdout").read_text() == "[1]<stdout>:a line\n"
    captured = capfd.readouterr()
    assert "[1]<stdout>:a line" in captured.out
    for each in ("--ssh-port=22", "--ssh-identity=id", "--start-timeout=60", "--launcher gloo"):
        assert each in captured.err


def test_a_job_over_mpi():
    if "mpi" not in installed().controllers:
        pytest.skip("this Horovod has no MPI")
    assert run(lambda: "OMPI_COMM_WORLD_RANK" in os.environ, use_mpi=True) == [True, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_no_pickle_of_another_user_who_has_made_the_folder(tmp_path):
    def replace(made):
        """Delete the folder as a cleaner of /tmp. Another user makes it, with a result."""

        class Pickle:
            def __reduce__(self):
                return os.mkdir, (made,)

        def of_other():
            with open(f"{folder}/result-0", "wb") as file:
                file.write(pickle.dumps(Pickle()))

        folder = sys.argv[1]
        shutil.rmtree(folder)
        os.mkdir(folder)
        os.chown(folder, 65534, 65534)
        atexit.register(of_other)

    made = tmp_path / "made"
    with pytest.raises(HvdkitError):
        hvdkit.run(replace, [str(made)], num_proc=1)
    assert not made.exists()
    for folder in (tmp_path / "tmp").glob("hvdkit-run*"):
        shutil.rmtree(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_remains_after_a_signal(number, tmp_path, folders):
    pids = tmp_path / "pids"
    pids.mkdir()
    with started_command(*script(tmp_path, SLEEP), pids) as caller:
        wait_until(lambda: len(list(pids.iterdir())) == 2)
        caller.send_signal(number)
        _, shown = caller.communicate(timeout=60)
    wait_until(lambda: not any(psutil.pid_exists(int(p.name)) for p in pids.iterdir()))
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in shown
    else:
        for folder in folders.glob("hvdkit-run*"):  # nobody is left to remove it
            assert folder.stat().st_mode & 0o777 == 0o700
            for each in folder.iterdir():
                each.unlink()
            folder.rmdir()
