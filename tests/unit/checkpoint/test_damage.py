"""Damaged and hostile folders: the newest good step is loaded, and nothing is run or followed."""

import errno
import json
import os
import pickle
import random
import re
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash

from hvdkit.checkpoint import manifest, tensors
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.step_files import rank_to_bytes
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from hvdkit.system.plain_files import json_values
from tests.unit.checkpoint.material import (
    assert_holds,
    assert_newest_good,
    file_record,
    forge,
    path_of,
    save,
    snapshot,
    step_folder,
)

# tests/unit/checkpoint/test_store.py tests the stores themselves.
pytestmark = pytest.mark.long_with("s3")

#: For faults that an object store does not have, or reports in another way.
in_a_folder = pytest.mark.parametrize("place", ["folder"], indirect=True)
#: For faults of the content, which is read by the same code from every storage.
usually_in_a_folder = pytest.mark.parametrize(
    "place", ["folder", pytest.param("s3", marks=pytest.mark.long)], indirect=True
)

#: The folder that code in a checkpoint makes, if it is run.
RAN = Path(tempfile.gettempdir()) / f"hvdkit-tests-ran-{os.getpid()}"

FILES = ["manifest.json", "state.json", "ranks.jsonl", "model.safetensors", "optimizer.safetensors"]


@pytest.fixture
def store(place):
    return save(place, 1, 2)


@pytest.fixture
def newest(store):
    return step_folder(store, 2)


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def assert_quarantined(store, caplog, file):
    assert_newest_good(store, 1)
    assert "step 2 in" in caplog.text
    assert f"{file}: " in caplog.text
    assert [info.step for info in store.steps()] == [1]
    (name,) = store.quarantined()
    assert "step-000000000002" in name
    assert f"it was quarantined as {name}." in caplog.text


#: change -> the content of a file after it; None for a missing file.
CHANGES = {
    "a flipped bit": lambda data: bytes(b ^ (i == len(data) // 2) for i, b in enumerate(data)),
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "shorter": lambda data: data[:-1],
    "longer": lambda data: data + b"\n",
    "missing": lambda data: None,
    "of another step": None,
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_quarantines_the_step(store, newest, caplog, file, change):
    assert {path.name for path in newest.iterdir()} - {"committed.json"} == set(FILES)
    path = newest / file
    if change == "of another step":
        content = (step_folder(store, 1) / file).read_bytes()
        if content == path.read_bytes():
            return  # `state.json`: all steps have the same
    else:
        content = CHANGES[change](path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    assert_quarantined(store, caplog, file)


@pytest.mark.parametrize("file", ["manifest.json"])
@usually_in_a_folder
def test_every_flipped_bit_is_found(store, newest, file):
    path = newest / file
    bits = 8 * path.stat().st_size
    count = 300 if isinstance(path, Path) else 30
    for bit in random.Random(0).sample(range(bits), min(bits, count)):
        flip(path, bit)
        assert store.verify(2), bit
        flip(path, bit)
    assert store.verify(2) == []


@in_a_folder
def test_a_folder_under_another_step_s_name(store, newest, caplog):
    shutil.rmtree(newest)
    shutil.copytree(step_folder(store, 1), newest)
    assert_quarantined(store, caplog, "manifest.json")


@pytest.mark.parametrize(("number", "fails"), [(errno.EIO, 1), (errno.EIO, 4), (errno.EACCES, 1)])
@in_a_folder
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    store, newest, monkeypatch, number, fails
):
    """An error of the disk may pass; that a file may not be read does not."""
    preadv = os.preadv
    failed = []

    def broken(descriptor, buffers, offset):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith("2/optimizer.safetensors") and len(failed) < fails:
            failed.append(name)
            raise OSError(number, os.strerror(number))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(disk, "_READ_AGAIN_SECONDS", 0)
    if (number, fails) == (errno.EIO, 1):
        assert_newest_good(store, 2)
    else:
        with pytest.raises(CheckpointError, match="optimizer.safetensors cannot be read") as raised:
            store.newest_good()
        assert not isinstance(raised.value, Damaged)
    assert len(failed) == fails
    assert store.quarantined() == []


@in_a_folder
def test_an_older_step_is_not_taken_for_the_newest_when_its_manifest_is_unreadable(
    store, newest, monkeypatch
):
    """The step is unreadable only once: it must not be opened as the newest one after that."""
    preadv = os.preadv
    failed = []

    def forbidden_once(descriptor, buffers, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("1/manifest.json") and not failed:
            failed.append(descriptor)
            raise PermissionError(13, os.strerror(13))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", forbidden_once)
    for ask in (store.newest_good, store.steps):
        failed.clear()
        with pytest.raises(CheckpointError, match="step-000000000001 in .*: Permission denied"):
            ask()
    assert_newest_good(store, 2)


def test_two_damaged_steps_of_one_number_get_two_names(store):
    for _ in range(2):
        flip(step_folder(store, 2) / "model.safetensors", 3000)
        assert_newest_good(store, 1)
        with store.open_for_writing() as writer:
            writer.write(snapshot(2))
    assert len(set(store.quarantined())) == 2


@in_a_folder
def test_a_step_that_is_removed_while_it_is_read(store, newest):
    with store.newest_good() as opened:
        shutil.rmtree(newest)
        assert_holds(opened, 2)


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def refused(store, caplog, file):
    """Assert that the newest step is quarantined because of `file`, and that no code was run."""
    assert_newest_good(store, 1)
    assert f"{file}: " in caplog.text
    assert not RAN.exists()


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "sub/state.json",
        ".",
        "..",
        "",
        "model.pt",
        "data.pkl",
        "state.json\0",
        "../model.safetensors",
        ".safetensors",
        "a" * 200 + ".safetensors",
        "Ünicode.safetensors",
    ],
)
@usually_in_a_folder
def test_a_manifest_with_a_name_that_leads_elsewhere(store, newest, caplog, name):
    (path_of(store.location) / "outside").write_bytes(b"")
    forge(
        newest,
        edit=lambda fields: fields["files"].update({name: file_record(b"")}),
    )
    refused(store, caplog, "manifest.json")
    assert "is not the name of a file of a checkpoint" in caplog.text


@pytest.mark.parametrize("what", ["file", "step"])
@in_a_folder
def test_a_link_out_of_the_folder(store, newest, caplog, what):
    linked = newest / "model.safetensors" if what == "file" else newest
    outside = path_of(store.location).parent / "outside"
    linked.rename(outside)
    linked.symlink_to(outside)
    refused(store, caplog, linked.name)


@in_a_folder
def test_a_folder_in_place_of_a_file(store, newest, caplog):
    (newest / "state.json").unlink()
    (newest / "state.json").mkdir()
    refused(store, caplog, "state.json")


@pytest.mark.parametrize("file", FILES)
@in_a_folder
def test_a_pipe_does_not_block(store, newest, caplog, file):
    (newest / file).unlink()
    os.mkfifo(newest / file)
    refused(store, caplog, file)


@pytest.mark.parametrize("file", ["state.json", "ranks.jsonl", "model.safetensors"])
@usually_in_a_folder
def test_a_pickle_is_not_opened_as_one(store, newest, caplog, file):
    forge(newest, {file: pickle.dumps(Canary(RAN))})
    refused(store, caplog, file)


def test_a_pickle_that_no_manifest_lists_is_ignored(store, newest):
    (newest / "data.pkl").write_bytes(pickle.dumps(Canary(RAN)))
    (path_of(store.location) / "data.pkl").write_bytes(pickle.dumps(Canary(RAN)))
    assert_newest_good(store, 2)
    assert not RAN.exists()


def file_with(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def f32(begin, end, shape=None):
    return {"dtype": "F32", "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        file_with(b"[]"),
        file_with(b'{"a":'),
        file_with({"a": f32(0, 8)}, b"1234"),
        file_with({"a": f32(0, 8, [3])}, b"12345678"),
        file_with({"a": f32(4, 8)}, b"12345678"),
        file_with({"a": f32(0, 8), "b": f32(4, 8)}, b"12345678"),
        file_with({"a": f32(0, 4), "b": f32(8, 12)}, b"123456789012"),
        file_with({"a": f32(0, 8, [2**40, 2**40])}, b"12345678"),
        file_with({"a": {**f32(0, 8), "dtype": "O"}}, b"12345678"),
        file_with(b'{"a":%b,"a":%b}' % ((json.dumps(f32(0, 8)).encode(),) * 2), b"12345678"),
        file_with({"a": f32(0, 8)}, b"12345678") + b"more",
    ],
)
@usually_in_a_folder
def test_an_invalid_tensor_file(store, newest, caplog, data):
    forge(newest, {"model.safetensors": data})
    refused(store, caplog, "model.safetensors")


@pytest.mark.parametrize(
    ("limit", "file", "data", "said"),
    [
        (
            (tensors, "MAX_HEADER_BYTES", 1000),
            "model.safetensors",
            lambda: struct.pack("<Q", 2002) + b"{" + b" " * 2000 + b"}",
            "its header would have 2002 bytes",
        ),
        (
            (manifest, "MAX_JSON_BYTES", 1000),
            "state.json",
            lambda: b"{" + b" " * 2000 + b"}",
            "expected at most 1000 of JSON",
        ),
        (
            (manifest, "MAX_RANK_BYTES", 1000),
            "ranks.jsonl",
            lambda: b"{" + b" " * 1500 + b"}\n{}\n",
            "it has a line of 1502 bytes; expected at most 1000",
        ),
        # The number of ranks in a forged manifest may be any: a file with a hole fills the memory.
        (
            (manifest, "MAX_RANKS_BYTES", 1000),
            "ranks.jsonl",
            lambda: (b"{" + b" " * 499 + b"}\n") * 2,
            "it has 1004 bytes; expected at most 1000",
        ),
        # A small file may take all memory once it is parsed.
        *(
            (
                (manifest, "MAX_JSON_VALUES", 10_000),
                "ranks.jsonl",
                lambda unit=unit: b"{}\n[" + b",".join([unit] * 10_001) + b"]\n",
                "it has too many values",
            )
            for unit in (b"[]", b'{"a":0}', b'"ab"', b"1.5")
        ),
        (
            (manifest, "MAX_MANIFEST_BYTES", manifest.MAX_MANIFEST_BYTES),
            "manifest.json",
            lambda: b" " * (manifest.MAX_MANIFEST_BYTES + 1),
            "expected at most 16000000",
        ),
    ],
)
@usually_in_a_folder
def test_a_file_larger_than_any_that_is_written(
    store, newest, caplog, monkeypatch, limit, file, data, said
):
    monkeypatch.setattr(*limit)
    if file == "manifest.json":
        (newest / file).write_bytes(data())
    else:
        forge(newest, {file: data()})
    refused(store, caplog, file)
    assert said in caplog.text


def test_lines_of_ranks_may_have_so_many_bytes_together(monkeypatch):
    monkeypatch.setattr(manifest, "MAX_RANKS_BYTES", 1000)
    with pytest.raises(UsageError, match="expected at most 499"):
        rank_to_bytes(" " * 499, ranks=2)
    assert len(rank_to_bytes(" " * 490, ranks=2)) == 492


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (b"1", 0),
        (b"[1,2,3]", 3),
        (b"[[],{}]", 7),
        (b'["[{,",",,,,",{"a,":0}]', 7),
        (b'["\\"[{,\\\\",1]', 2),
        (b'"[[[[[["', 0),
        (b"[" * 100, 100),
    ],
)
def test_values_are_counted_without_texts(text, count):
    # A limit that the rough count exceeds, and the exact one does not.
    assert json_values(text + b'"' + b"[" * 10_000, 200) == count


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"7",
        b"[" * 100_000,
        b'{"model": ' * 5000,
        b"\xff\xfe",
        b'{"loop": NaN, "model": 1, "optimizer": 1}',
        b'{"loop": 1, "loop": 2, "model": 1, "optimizer": 1}',
        b'{"loop": 1}',
        b'{"loop": {"$tensor": "gone"}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$tensor": ["a"]}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$numpy": ["O", "AAAAAAAAAAA="]}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$numpy": ["<f8", "AA=="]}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$import": "os"}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$tuple": [1], "x": 1}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$dict": [[[1], 2]]}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$dict": [1, 2]}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$int": "zz"}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$bytes": 5}, "model": 1, "optimizer": 1}',
        b'{"loop": {"$complex": [{"$bytes": "AA=="}, 1]}, "model": 1, "optimizer": 1}',
        b'{"loop": 1, "model": 1, "optimizer": 1}',
        b'{"../x": 1, "model": 1, "optimizer": 1}',
    ],
)
@usually_in_a_folder
def test_state_that_hvdkit_does_not_write(store, newest, caplog, data):
    forge(newest, {"state.json": data})
    refused(store, caplog, "state.json")


@usually_in_a_folder
@pytest.mark.parametrize("time", ["1e300", "-1e12", "1" * 400, "NaN"])
def test_a_time_that_no_clock_shows(store, newest, caplog, time):
    text = (newest / "manifest.json").read_bytes().rpartition(b',\n "xxh3_128"')[0]
    seal = manifest.sealed({"x": 1}).rpartition(b',\n "xxh3_128"')
    text = re.sub(rb'"time": [^,]+', b'"time": ' + time.encode(), text)
    digest = xxhash.xxh3_128_hexdigest(text).encode()
    (newest / "manifest.json").write_bytes(text + seal[1] + b': "' + digest + b'"\n}\n')
    refused(store, caplog, "manifest.json")


@usually_in_a_folder
def test_tensors_under_each_other_s_names(store, newest, caplog):
    state = (newest / "state.json").read_text()
    state = state.replace('"$tensor": "layer.half"', '"$tensor": "x"')
    state = state.replace('"$tensor": "layer.mask"', '"$tensor": "layer.half"')
    forge(newest, {"state.json": state.replace('"x"', '"layer.mask"').encode()})
    refused(store, caplog, "state.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "other"),
        ("run", 10**9),
        ("commit", 10**18),
        ("step", 3),
        ("step", -2),
        ("step", "2"),
        ("step", 2.0),
        ("step", True),
        ("world_size", None),
        ("epoch", []),
        ("commit", 2**80),
        ("time", "now"),
        ("metrics", []),
        ("metrics", {"loss": "low"}),
        ("metrics", {"loss": {"$bytes": "AA=="}}),
        ("versions", {"hvdkit": 1}),
        ("sum_order", ["gloo"]),
        ("files", []),
        ("files", {}),
        ("files", {"state.json": 5}),
        ("files", {"state.json": file_record(b"{}") | {"bytes": -1}}),
        ("files", {"state.json": file_record(b"{}") | {"xxh3_128": ["x"]}}),
        ("files", {"state.json": file_record(b"{}") | {"xxh3_128": "0" * 32}}),
        ("files", {"state.json": file_record(b"{}") | {"xxh3_128": []}}),
        ("files", {"state.json": file_record(b"{}") | {"chunk_bytes": 0}}),
        ("files", {"state.json": file_record(b"{}") | {"chunk_bytes": 1}}),
        ("files", {"state.json": {"bytes": 1}}),
    ],
)
@usually_in_a_folder
def test_a_manifest_that_hvdkit_does_not_write(store, newest, caplog, field, value):
    forge(newest, edit=lambda fields: fields.update({field: value}))
    refused(store, caplog, "state.json" if value == {} else "manifest.json")


def test_a_step_of_a_later_version_is_left_alone(store, newest):
    forge(newest, edit=lambda fields: fields.update(version=3))
    with pytest.raises(CheckpointError, match="has format version 3; .* Update hvdkit") as raised:
        store.newest_good()
    assert not isinstance(raised.value, Damaged)
    assert store.quarantined() == []


@in_a_folder
def test_deleting_does_not_follow_links(store, newest):
    outside = path_of(store.location).parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (newest / "out").symlink_to(outside)
    (newest / "sub").mkdir()
    (newest / "sub" / "out").symlink_to(outside / "precious")
    with Store(path_of(store.location), keep_last=1).open_for_writing() as writer:
        writer.write(snapshot(3))
    assert not newest.exists()
    assert (outside / "precious").read_text() == "x"


def test_a_name_of_another_user_is_logged_without_escape_sequences(tmp_path, caplog):
    caplog.set_level("INFO", "hvdkit")
    (tmp_path / ".writing-\x1b[31m").mkdir()
    Store(tmp_path).open_for_writing().close()
    shown = next(each for each in caplog.messages if "removing the unfinished" in each)
    assert shown.isprintable()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (".writer", lambda path: path.symlink_to(path.parents[1] / "outside")),
        # A pipe cannot be locked, as a file of some file systems.
        (".lock", os.mkfifo),
    ],
)
def test_lock_files_of_other_kinds_are_refused(tmp_path, name, make):
    (tmp_path / "runs").mkdir()
    make(tmp_path / "runs" / name)
    with pytest.raises(CheckpointError, match="cannot write to"):
        Store(tmp_path / "runs").open_for_writing()
    assert not (tmp_path / "outside").exists()


def test_reading_more_bytes_than_there_are_is_an_error(store):
    with store.newest_good() as opened:
        stream = opened.stream("model")
        stream.read_into(np.empty(stream.size, np.uint8))
        with pytest.raises(ValueError, match="1 more bytes were requested"):
            stream.read_into(np.empty(1, np.uint8))
