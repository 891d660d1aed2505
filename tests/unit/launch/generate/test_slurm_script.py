import signal

import pytest

from hvdkit.cli import main
from tests.unit.launch.commands import execute, started_command


@pytest.fixture
def generate(capsys):
    """Return a function that returns the script; or the error, if another status is expected."""

    def generated(*arguments, status=0):
        assert main(["generate", "slurm", *arguments]) == status
        shown = capsys.readouterr()
        return shown.err if status else shown.out

    return generated


def directives(script):
    return [line for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_directives_of_all_options(generate):
    sizes = ("--nodes", "2", "--gpus-per-node", "4", "--cpus-per-task", "12", "--time", "8:00:00")
    others = ("--partition", "gpu", "--account", "lab", "--grace", "300", "--restarts", "5")
    script = generate(*sizes, *others, "python", "my train.py", "--resume")
    assert directives(script) == [
        "#SBATCH --job-name=my_train",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=lab",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=8:00:00",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@300",
    ]
    assert "\nhvdkit run --stop-grace 300 --restarts 5 python 'my train.py' --resume &\n" in script


def test_missing_options_are_commented_directives_before_the_first_command(generate):
    script = generate("--", "python", "train.py")
    assert "##SBATCH --gpus-per-node=4" in script
    assert "#SBATCH --ntasks-per-node=1" in directives(script)
    assert "#SBATCH --job-name=train" in directives(script)
    # sbatch reads directives only before the first command.
    lines = script.splitlines()
    last = max(n for n, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last] if line)


# Replacements of Slurm's commands. tests/hosts/test_slurm.py uses a real Slurm.
FAKE_COMMANDS = """
hvdkit() {{
    trap 'exit 75' USR1
    numbers=$(seq 100)  # before `up`: bash fails if a signal arrives while it parses $(...)
    echo up
    for n in $numbers; do sleep 0.1; done
    exit {status}
}}
squeue() {{ echo {state}; }}
scontrol() {{ echo "scontrol $*"; }}
"""


def run_quickly(script, folder, status, state, **env):
    """Run the script, with an `hvdkit` that ends at once."""
    quick = FAKE_COMMANDS.format(status=status, state=state).replace("seq 100", "seq 1")
    (folder / "job.sh").write_text(quick + script)
    own = {"SLURM_JOB_ID": "12", "PATH": "/usr/bin:/bin", **env}
    return execute(["bash", folder / "job.sh"], env=own)


@pytest.mark.parametrize(
    ("status", "state", "requeued"),
    [("75", "RUNNING", True), ("75", "COMPLETING", False), ("3", "RUNNING", False)],
)
def test_only_a_running_job_that_has_saved_is_requeued(generate, status, state, requeued, tmp_path):
    done = run_quickly(generate("python", "train.py"), tmp_path, status, state)
    assert done.returncode == int(status)
    assert ("scontrol requeue 12" in done.stdout) == requeued


def test_one_task_of_an_array_is_requeued_alone(generate, tmp_path):
    """Job 12 is also the whole array. `squeue` then prints a line for each task."""
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"}
    tasks = "$([[ $* = *=12_0* ]] || echo RUNNING) RUNNING"
    done = run_quickly(generate("python", "train.py"), tmp_path, "75", tasks, **array)
    assert "scontrol requeue 12_0\n" in done.stdout


def test_a_signal_reaches_hvdkit_and_the_script_waits_for_it(generate, tmp_path):
    script = generate("python", "train.py")
    (tmp_path / "job.sh").write_text(FAKE_COMMANDS.format(status=0, state="RUNNING") + script)
    env = {"SLURM_JOB_ID": "12", "PATH": "/usr/bin:/bin"}
    with started_command("bash", tmp_path / "job.sh", env=env) as job:
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGUSR1)
        out, _ = job.communicate(timeout=600)
    assert job.returncode == 75
    assert "scontrol requeue 12" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nodes", "2"], "there is no command for the ranks"),
        (["--nodes", "0", "python"], "--nodes is 0: expected at least 1"),
        (["--time", "a day", "python"], "--time is a day: expected"),
        (["--time", "3", "python"], "--time is 3, and --grace is 120 seconds"),
        (["--time", "0:10:59", "--grace", "600", "python"], "Expected a time of more than 660 sec"),
        (["--time", "0-1", "--grace", "3600", "python"], "--time is 0-1, and"),
        (["--partition", "a b", "python"], "expected one word"),
    ],
)
def test_wrong_arguments_are_status_2(generate, arguments, expected):
    assert expected in generate(*arguments, status=2)


@pytest.mark.parametrize("time", ["4", "3:01", "0:3:01", "0-1", "1-0:0", "0"])
def test_a_time_that_is_longer_than_the_grace(generate, time):
    assert f"#SBATCH --time={time}" in directives(generate("--time", time, "python"))


def test_a_file_is_not_overwritten(generate, tmp_path):
    path = tmp_path / "job.sh"
    generate("-o", str(path), "python", "train.py")
    assert path.read_text().startswith("#!/bin/bash\n")
    path.write_text("edited")
    assert f"-o {path} exists" in generate("-o", str(path), "python", "train.py", status=1)
    assert path.read_text() == "edited"


@pytest.mark.parametrize("kind", ["kubernetes", "slurm"])
def test_every_kind_has_help_with_an_example(kind, capsys):
    with pytest.raises(SystemExit):
        main(["generate", kind, "--help"])
    assert f"example:\n  hvdkit generate {kind}" in capsys.readouterr().out
