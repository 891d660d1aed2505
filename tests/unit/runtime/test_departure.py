"""The notes of ranks that call `hvd.shutdown()`."""

import json
import threading
import time
from pathlib import Path

import pytest

import hvdkit
from hvdkit.runtime.departure import Departure


def departure(folder, size=2):
    made = Departure({"HVDKIT_RECORD_DIR": str(folder)})
    made.begin(size)
    return made


def test_a_note_names_the_rank_and_the_line(tmp_path):
    departure(tmp_path).write(1)
    text = departure(tmp_path).explain(0)
    assert text.startswith("Rank 1 on ")
    assert "called hvd.shutdown() at " in text
    assert "test_departure.py:" in text
    assert "in test_a_note_names_the_rank_and_the_line: departure(tmp_path).write(1)." in text


def test_a_script_beside_the_package_is_the_users_code(tmp_path):
    script = f"{Path(hvdkit.__file__).parent}_examples/train.py"
    exec(compile("own.write(1)", script, "exec"), {"own": departure(tmp_path)})
    (text,) = [json.loads(path.read_text())["text"] for path in tmp_path.iterdir()]
    assert f"called hvd.shutdown() at {script}:1 in <module>." in text


def test_the_error_of_a_collective_names_the_rank(tmp_path):
    departure(tmp_path).write(1)

    def wait(text):
        raise RuntimeError(text)

    explained = departure(tmp_path).explained(wait)
    with pytest.raises(RuntimeError, match=r"Horovod has been shut down\. Rank 1 on"):
        explained("Horovod has been shut down.")
    with pytest.raises(RuntimeError, match="memory$"):
        explained("out of memory")


def test_a_rank_that_ends_because_of_an_error_writes_no_note(tmp_path):
    try:
        raise ValueError("no sample")
    except ValueError:
        departure(tmp_path).write(1)
    departure(tmp_path, size=1).write(0)
    assert not list(tmp_path.iterdir())


def test_only_the_first_rank_is_named(tmp_path):
    departure(tmp_path).write(1)
    departure(tmp_path).write(0)
    assert [path.name for path in tmp_path.iterdir()] == ["shutdown-1.json"]


def test_a_rank_that_starts_again_removes_its_note(tmp_path):
    own = departure(tmp_path)
    own.write(1)
    own.remove()
    own.remove()
    assert not list(tmp_path.iterdir())


def test_a_note_of_another_host_is_waited_for(tmp_path):
    (tmp_path / "rank-0.stacks").touch()
    (tmp_path / "rank-1.stacks").touch()
    # All ranks write to this folder.
    began = time.monotonic()
    assert departure(tmp_path, size=2).explain(60) == ""
    assert time.monotonic() - began < 30
    late = threading.Timer(0.2, departure(tmp_path, size=3).write, [2])
    late.start()
    assert departure(tmp_path, size=3).explain(60).startswith("Rank 2 on ")
    late.join()


def test_without_a_folder_there_are_no_notes():
    own = Departure({})
    own.begin(2)
    own.write(1)
    assert own.explain(60) == ""
