import json
import os

import pytest

from hvdkit.launch.agent import host_facts


@pytest.mark.parametrize(
    ("command", "files", "expected"),
    [
        (["sh"], [], []),
        (["no-such"], [], ["no program 'no-such' on PATH; install it, or give its full path"]),
        (["./run.sh"], [], ["no file './run.sh' in"]),
        (["./my job.sh"], [], ["the file './my job.sh' is not executable; run `chmod +x './my"]),
        (["./folder"], [], ["'./folder' is a directory; expected a program"]),
        (["sh", "x.sh"], ["x.sh"], ["no file x.sh in"]),
        # The system gives an error for these, as for files in a folder of another user.
        (["./" + 300 * "x"], [], ["no file './xxx"]),
        (["sh", 300 * "x"], [300 * "x"], ["no file xxx"]),
    ],
)
def test_problems_of_a_command(tmp_path, command, files, expected):
    (tmp_path / "my job.sh").touch()
    (tmp_path / "folder").mkdir()
    found = host_facts.problems(command, str(tmp_path), os.environ["PATH"], files)
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))


def test_a_missing_directory():
    (problem,) = host_facts.problems(["sh"], "/no/such", None, [])
    assert problem.startswith("no directory /no/such; every host must see the job's files there")


def test_facts_can_be_sent_as_json():
    task = {"command": ["sh"], "directory": "/", "path": None, "files": []}
    found = json.loads(json.dumps(host_facts.facts(task)))
    assert 1 <= found["cores"] <= os.cpu_count()
    assert found["python"].startswith("3.")
