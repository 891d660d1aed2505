"""Damaged and hostile folders: the newest good step is loaded, and nothing is run or followed."""

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
from hvdkit.checkpoint.store import Store
from hvdkit.checkpoint.writing import rank_to_bytes
from hvdkit.errors import UsageError
from hvdkit.plain_files import json_values
from tests.checkpoint.material import (
    assert_holds,
    assert_newest_good,
    content,
    cut,
    file_record,
    forge,
    path_of,
    remove,
    save,
    snapshot,
    step_folder,
)

# tests/checkpoint/test_store.py tests the stores themselves.
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


def test_a_step_has_these_files(newest):
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_quarantines_the_step(store, newest, caplog, file):
    flip(newest / file, 8 * ((newest / file).stat().st_size // 2))
    assert_quarantined(store, caplog, file)


@pytest.mark.parametrize("file", FILES)
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


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("left", [0.0, 0.5, -1])
def test_a_truncated_file(store, newest, caplog, file, left):
    size = (newest / file).stat().st_size
    cut(newest / file, size - 1 if left == -1 else int(size * left))
    assert_quarantined(store, caplog, file)


@pytest.mark.parametrize("file", FILES)
def test_a_longer_file(store, newest, caplog, file):
    (newest / file).write_bytes((newest / file).read_bytes() + b"\n")
    assert_quarantined(store, caplog, file)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file(store, newest, caplog, file):
    (newest / file).unlink()
    assert_quarantined(store, caplog, file)


@pytest.mark.parametrize("file", ["ranks.jsonl", "model.safetensors", "optimizer.safetensors"])
def test_a_file_of_another_step(store, newest, caplog, file):
    (newest / file).write_bytes((step_folder(store, 1) / file).read_bytes())
    assert_quarantined(store, caplog, file)


@in_a_folder
def test_a_folder_under_another_step_s_name(store, newest, caplog):
    shutil.rmtree(newest)
    shutil.copytree(step_folder(store, 1), newest)
    assert_quarantined(store, caplog, "manifest.json")


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from_then_on"])
@in_a_folder
def test_a_file_that_the_disk_cannot_read_is_not_called_damaged(
    store, newest, monkeypatch, lasting
):
    preadv = os.preadv
    failed = []

    def broken(descriptor, buffers, offset):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith("2/optimizer.safetensors") and (lasting or not failed):
            failed.append(name)
            raise OSError(5, os.strerror(5))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(disk, "_READ_AGAIN_SECONDS", 0)
    if lasting:
        with pytest.raises(CheckpointError, match="optimizer.safetensors cannot be read") as raised:
            store.newest_good()
        assert not isinstance(raised.value, Damaged)
        assert len(failed) == 4
    else:
        assert_newest_good(store, 2)
    assert store.quarantined() == []


@in_a_folder
def test_a_file_that_may_not_be_read_is_not_called_damaged(store, newest, monkeypatch):
    def forbidden(descriptor, buffers, offset):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(os, "preadv", forbidden)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied") as raised:
        store.newest_good()
    assert not isinstance(raised.value, Damaged)
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


def test_if_no_step_is_good_each_attempt_is_an_error(store, newest):
    for folder in (newest, step_folder(store, 1)):
        flip(folder / "model.safetensors", 3000)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none of the 2 steps .*step 2, is damaged"):
            store.newest_good()
    assert store.quarantined() == []


def test_a_requested_step_that_is_damaged(store, newest):
    flip(newest / "state.json", 80)
    with pytest.raises(CheckpointError, match="step 2 .* damaged .state.json: .*bytes 0 to"):
        store.newest_good(2)
    assert store.quarantined() == []
    with store.newest_good(1) as opened:
        assert_holds(opened, 1)


def test_a_missing_step(store):
    with pytest.raises(UsageError, match="there is no step 7 in .*; expected one of: 2, 1"):
        store.newest_good(7)
    with pytest.raises(UsageError, match="there is no step 7"):
        store.verify(7)


def test_two_damaged_steps_of_one_number_get_two_names(store):
    for _ in range(2):
        flip(step_folder(store, 2) / "model.safetensors", 3000)
        assert_newest_good(store, 1)
        with store.open_for_writing() as writer:
            writer.write(snapshot(2))
    assert len(set(store.quarantined())) == 2


@in_a_folder
def test_a_change_after_the_verification_is_noticed(store, newest):
    with store.newest_good() as opened:
        path = newest / "model.safetensors"
        flip(path, 8 * (path.stat().st_size - 1))
        with pytest.raises(Damaged, match="model.safetensors: its content is not what was written"):
            content(opened)


@in_a_folder
def test_a_step_that_is_removed_while_it_is_read(store, newest):
    with store.newest_good() as opened:
        shutil.rmtree(newest)
        assert_holds(opened, 2)


def test_a_step_that_a_live_writer_removes_meanwhile_is_not_damaged(store, newest, monkeypatch):
    from hvdkit.checkpoint import store as module

    examine = module.examine

    def slow(open_step, step, progress=None, **options):
        if step == 2 and (newest / "state.json").exists():
            with store.open_for_writing() as writer:
                writer.write(snapshot(3))
            remove(newest)
        return examine(open_step, step, progress, **options)

    monkeypatch.setattr(module, "examine", slow)
    with store.newest_good() as opened:
        assert opened.manifest.step in (1, 3)
    assert store.quarantined() == []


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


@in_a_folder
def test_a_link_out_of_the_folder(store, newest, caplog):
    outside = path_of(store.location).parent / "outside"
    (newest / "model.safetensors").rename(outside)
    (newest / "model.safetensors").symlink_to(outside)
    refused(store, caplog, "model.safetensors")
    assert "is a symbolic link" in caplog.text


@in_a_folder
def test_a_step_that_is_a_link(store, newest, caplog):
    newest.rename(path_of(store.location).parent / "outside")
    newest.symlink_to(path_of(store.location).parent / "outside")
    refused(store, caplog, "step-000000000002")


@pytest.mark.parametrize("file", FILES)
@in_a_folder
def test_a_pipe_does_not_block(store, newest, caplog, file):
    (newest / file).unlink()
    os.mkfifo(newest / file)
    refused(store, caplog, file)


@in_a_folder
def test_a_folder_in_place_of_a_file(store, newest, caplog):
    (newest / "state.json").unlink()
    (newest / "state.json").mkdir()
    refused(store, caplog, "state.json")


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


@usually_in_a_folder
def test_a_header_larger_than_any_that_is_written(store, newest, caplog, monkeypatch):
    monkeypatch.setattr(tensors, "MAX_HEADER_BYTES", 1000)
    forge(newest, {"model.safetensors": file_with(b"{" + b" " * 2000 + b"}")})
    refused(store, caplog, "model.safetensors")
    assert "its header would have 2002 bytes" in caplog.text


@usually_in_a_folder
def test_json_larger_than_any_that_is_written(store, newest, caplog, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_JSON_BYTES", 1000)
    forge(newest, {"state.json": b"{" + b" " * 2000 + b"}"})
    refused(store, caplog, "state.json")
    assert "expected at most 1000 of JSON" in caplog.text


@usually_in_a_folder
def test_a_line_of_a_rank_larger_than_any_that_is_written(store, newest, caplog, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_RANK_BYTES", 1000)
    forge(newest, {"ranks.jsonl": b"{" + b" " * 1500 + b"}\n{}\n"})
    refused(store, caplog, "ranks.jsonl")
    assert "it has a line of 1502 bytes; expected at most 1000" in caplog.text


@usually_in_a_folder
def test_more_lines_of_ranks_than_are_written(store, newest, caplog, monkeypatch):
    """The number of ranks in a forged manifest may be any: a file with a hole fills the memory."""
    monkeypatch.setattr(manifest, "MAX_RANKS_BYTES", 1000)
    with pytest.raises(UsageError, match="expected at most 499"):
        rank_to_bytes(" " * 499, ranks=2)
    assert len(rank_to_bytes(" " * 490, ranks=2)) == 492
    forge(newest, {"ranks.jsonl": b"{" + b" " * 499 + b"}\n{" + b" " * 499 + b"}\n"})
    refused(store, caplog, "ranks.jsonl")
    assert "it has 1004 bytes; expected at most 1000" in caplog.text


@usually_in_a_folder
@pytest.mark.parametrize("unit", [b"[]", b'{"a":0}', b'"ab"', b"1.5"])
def test_json_with_more_values_than_is_written(store, newest, caplog, monkeypatch, unit):
    """A small file may take all memory once it is parsed."""
    monkeypatch.setattr(manifest, "MAX_JSON_VALUES", 10_000)
    forge(newest, {"ranks.jsonl": b"{}\n[" + b",".join([unit] * 10_001) + b"]\n"})
    refused(store, caplog, "ranks.jsonl")
    assert "it has too many values" in caplog.text


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


@usually_in_a_folder
def test_a_manifest_larger_than_any_that_is_written(store, newest, caplog):
    (newest / "manifest.json").write_bytes(b" " * (manifest.MAX_MANIFEST_BYTES + 1))
    refused(store, caplog, "manifest.json")
    assert "expected at most 16000000" in caplog.text


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
        ("beside", "../other"),
        ("beside", [1]),
        ("unsaved", [1]),
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


def test_lock_files_that_are_links_are_not_followed(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".writer").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="cannot write to"):
        Store(tmp_path / "runs").open_for_writing()
    assert not (tmp_path / "outside").exists()


def test_a_pipe_does_not_turn_locking_off(tmp_path):
    """A pipe cannot be locked, as a file of some file systems."""
    (tmp_path / "runs").mkdir()
    os.mkfifo(tmp_path / "runs" / ".lock")
    with pytest.raises(CheckpointError, match="cannot write to"):
        Store(tmp_path / "runs").open_for_writing()


def test_reading_more_bytes_than_there_are_is_an_error(store):
    with store.newest_good() as opened:
        stream = opened.stream("model")
        stream.read_into(np.empty(stream.size, np.uint8))
        with pytest.raises(ValueError, match="1 more bytes were requested"):
            stream.read_into(np.empty(1, np.uint8))
