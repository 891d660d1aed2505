"""A spare interpreter runs a command exactly as Python does."""

import json
import os
import select
import subprocess
import sys
import time

import numpy
import pytest

from hvdkit.launch.agent.spares.command import PythonCommand, recognise
from hvdkit.launch.agent.spares.spare import Spare
from hvdkit.system.processes import GROUP_VARIABLE, ProcessGroup
from tests.unit.launch.commands import execute

SECONDS = 60
NUMPY = {"numpy": numpy.__spec__.origin}

PROBE = """
import os, sys
import json, signal, threading
names = ("SPARE", "PYTHON", "HOROVOD", "PROBE", "PATH")
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "file": __file__,
    "spec": __spec__ and __spec__.name, "name": __name__, "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(), "globals": sorted(globals()),
    "flags": repr(sys.flags), "warnings": sys.warnoptions, "options": sys._xoptions,
    "environ": {n: v for n, v in os.environ.items() if n.startswith(names)},
    "cwd": os.getcwd(), "threads": threading.active_count(),
    "tasks": len(os.listdir("/proc/self/task")),
    "oom": open("/proc/self/oom_score_adj").read(),
    "files": {fd: os.path.exists(f"/proc/self/fd/{fd}") for fd in range(3, 20)},
    "signals": [repr(signal.getsignal(n)) for n in range(1, 32)],
    "blocked": repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [(s.line_buffering, s.write_through, s.encoding) for s in (sys.stdout, sys.stderr)],
    "sitecustomize": "sitecustomize" in sys.modules, "stdin": sys.stdin.read(),
}))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("script.py", "module.py", "package/part.py"):
        (tmp_path / name).write_text(PROBE)
    (tmp_path / "link.py").symlink_to("package/part.py")
    (tmp_path / "libraries").mkdir()
    return tmp_path


@pytest.fixture
def group():
    group = ProcessGroup()
    yield group
    for _ in group.terminate(0):
        time.sleep(0.01)


def environment(**others):
    # A spare has imported NumPy, which would start threads.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    left_out = (GROUP_VARIABLE, "PYTEST_CURRENT_TEST")
    return {n: v for n, v in os.environ.items() if n not in left_out} | threads | others


def spare_of(group, command, folder, env, modules=NUMPY, variables=None):
    """Return a spare that has imported the modules."""
    python = recognise(command, str(folder), env)
    assert python is not None
    spare = Spare(group, command, python, str(folder), env, [])
    spare.load(modules, env | (variables or {}))
    deadline = time.monotonic() + SECONDS
    while not spare.ready and spare.process.poll() is None and time.monotonic() < deadline:
        select.select([spare.socket], [], [], 0.1)
    return spare


def has_started(spare, seconds):
    """Return whether the spare begins to run its command within some seconds."""
    deadline = time.monotonic() + seconds
    while not spare.started and time.monotonic() < deadline:
        select.select([spare.socket], [], [], 0.1)
    return spare.started


def run_spare(spare, env):
    """Let the spare run. Return its status, output and errors."""
    assert spare.ready
    spare.start(env)
    assert has_started(spare, SECONDS)
    spare.close()
    output, errors = spare.process.communicate(timeout=SECONDS)
    return spare.process.returncode, output.decode(), errors.decode()


def run_python(command, folder, env):
    done = execute(command, cwd=folder, env=env, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["script.py", "-m", "x"],
        ["-u", "-OO", "./script.py"],
        ["-P", "script.py"],
        ["-W", "error", "-Xutf8", "-X", "dev", "link.py", ""],
        ["-m", "module", "-u"],
        ["-Bs", "-m", "package.part"],
    ],
)
def test_a_spare_is_python(group, folder, arguments):
    command = [sys.executable, *arguments]
    before = environment(PYTHONPATH=str(folder / "libraries"), HOROVOD_RANK="1", PROBE_OLD="x")
    after = environment(PYTHONPATH=str(folder / "libraries"), HOROVOD_RANK="2", PROBE_NEW="ü\udcff")
    spare = spare_of(group, command, folder, before)
    status, output, errors = run_spare(spare, after)
    expected = run_python(command, folder, after)
    assert (status, errors) == (0, expected[2])
    assert json.loads(output) == json.loads(expected[1])


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print('out'); sys.exit(3)",
        "def f():\n    raise ValueError(__file__)\nf()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit, sys; atexit.register(print, 'at exit'); sys.exit('text')",
        "this is no Python",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    ],
)
def test_ends_are_those_of_python(group, folder, code):
    (folder / "script.py").write_text(code)
    command = [sys.executable, "script.py"]
    spare = spare_of(group, command, folder, environment())
    assert run_spare(spare, environment()) == run_python(command, folder, environment())


def test_the_script_is_that_of_the_start(group, folder):
    command = [sys.executable, "script.py"]
    spare = spare_of(group, command, folder, environment())
    (folder / "script.py").write_text("import new; print(new.VALUE, end='')")
    (folder / "new.py").write_text("VALUE = 1")
    assert run_spare(spare, environment()) == (0, "1", "")


def test_modules_are_imported_with_the_variables_of_the_script(group, folder):
    (folder / "heavy.py").write_text(
        "import os, sys\nREAD = os.environ['SET_BY_SCRIPT']\nos.environ['SET_BY_IMPORT'] = '1'\n"
        "print('imported', flush=True)"
    )
    (folder / "script.py").write_text(
        "import os, sys\nprint('heavy' in sys.modules, os.environ.get('SET_BY_SCRIPT'))\n"
        "import heavy\nprint(heavy.READ, os.environ['SET_BY_IMPORT'])"
    )
    command = [sys.executable, "script.py"]
    modules = {"heavy": str(folder / "heavy.py")}
    env = environment()
    spare = spare_of(group, command, folder, env, modules, {"SET_BY_SCRIPT": "2"})
    # The output of the import is that of the rank.
    assert run_spare(spare, env) == (0, "imported\nTrue None\n2 1\n", "")


def test_the_users_sitecustomize_runs(group, folder):
    (folder / "libraries" / "sitecustomize.py").write_text("import sys; sys.customized = __file__")
    (folder / "script.py").write_text(
        "import sys, sitecustomize; print(sys.customized == sitecustomize.__file__)"
    )
    env = environment(PYTHONPATH=str(folder / "libraries"))
    spare = spare_of(group, [sys.executable, "script.py"], folder, env)
    assert run_spare(spare, env) == (0, "True\n", "")


def assert_gives_up(spare):
    assert not spare.ready
    assert spare.process.wait(SECONDS) == 1
    spare.kill()


def test_a_spare_ends_if_the_environment_depends_on_the_rank(group, folder):
    """The next start may give the spare another rank."""
    (folder / "libraries" / "sitecustomize.py").write_text(
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['HOROVOD_RANK']"
    )
    env = environment(PYTHONPATH=str(folder / "libraries"), HOROVOD_RANK="1")
    assert_gives_up(spare_of(group, [sys.executable, "script.py"], folder, env))


@pytest.mark.parametrize("modules", [{"numpy": "/other/numpy.py"}, {"no_module": None}])
def test_a_spare_ends_if_it_finds_other_modules(group, folder, modules):
    command = [sys.executable, "script.py"]
    assert_gives_up(spare_of(group, command, folder, environment(), modules))


def test_a_spare_that_cannot_start_does_not_run_the_command(group, folder):
    """Its agent starts another process, so the script would run twice."""
    (folder / "script.py").write_text("open(__file__ + '.run', 'w').close()")
    work = folder / "work"
    work.mkdir()
    command = [sys.executable, str(folder / "script.py")]
    spare = spare_of(group, command, work, environment())
    assert spare.ready
    work.rmdir()
    spare.start(environment())
    assert spare.process.wait(SECONDS) == 1
    assert not spare.started
    assert not (folder / "script.py.run").exists()
    spare.kill()


def test_a_spare_ends_with_its_agent(group, folder):
    spare = spare_of(group, [sys.executable, "script.py"], folder, environment())
    spare.close()
    assert spare.process.wait(SECONDS) == 0
    spare.kill()


def test_other_commands_have_no_spare(folder):
    (folder / "python").write_text("#!/bin/sh\n")
    (folder / "python").chmod(0o755)
    for line in (
        *("bash run.sh", "python", "python -", "python -c 1", "python -E script.py"),
        *("python -uI script.py", "python -i script.py", "python -m", "python package"),
        *("python missing.py", "python --version", f"{folder}/python script.py"),
    ):
        assert recognise(line.split(), str(folder), environment()) is None, line


def test_commands_of_python(folder):
    at = str(folder)
    assert recognise(["python", "link.py"], at, environment()) == PythonCommand(
        [f"{at}/package"], f"{at}/link.py"
    )
    assert recognise(["python3", "-m", "x"], at, environment()) == PythonCommand([at], "")
    safe = environment(PYTHONSAFEPATH="1")
    assert recognise([sys.executable, "link.py"], at, safe) == PythonCommand([], f"{at}/link.py")
