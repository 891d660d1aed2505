import dataclasses
import errno
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from hvdkit.checkpoint import chunks, manifest, reading, storage, tree
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.pruning import of_older_runs, prunable
from hvdkit.checkpoint.reading import Outline
from hvdkit.checkpoint.retention import KeepBest, Retention
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.step_files import EncodedPart, Snapshot
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from tests.unit.checkpoint.material import (
    assert_holds,
    assert_newest_good,
    cut,
    leftovers,
    names,
    path_of,
    remove,
    save,
    snapshot,
    step_folder,
)


def test_what_is_saved_is_restored_to_the_bit(place):
    store = save(place / "a" / "b", 1, 2, 3)
    assert_newest_good(store, 3)
    for step in (1, 2, 3):
        with store.newest_good(step) as opened:
            assert_holds(opened, step)
    assert leftovers(path_of(store.location)) == []


def test_a_file_system_that_lists_an_open_folder_only_once(tmp_path, monkeypatch):
    # As sshfs does.
    listed = set()
    plain_listdir, plain_close = os.listdir, os.close

    def listdir(place="."):
        if place in listed:
            return []
        if isinstance(place, int):
            listed.add(place)
        return plain_listdir(place)

    def close(descriptor):
        listed.discard(descriptor)
        plain_close(descriptor)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os, "close", close)
    store = Store(tmp_path, keep_last=2)
    with store.open_for_writing() as writer:
        for step in (1, 2, 3, 3):
            writer.write(snapshot(step))
    assert [info.step for info in store.steps()] == [2, 3]
    assert leftovers(path_of(store.location)) == []


def test_a_folder_without_steps(place):
    for store in (Store(str(place / "none")), Store(str(place))):
        assert store.steps() == []
        assert store.newest_good() is None
        assert store.quarantined() == []
    assert not place.exists() or list(place.iterdir()) == []


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot read .*file: Not a directory"):
        store.newest_good()
    with pytest.raises(CheckpointError, match="cannot write to .*file: File exists"):
        store.open_for_writing()


def test_other_files_in_the_folder_are_not_touched(tmp_path):
    for name in ("step-5", "step-000000000009.old", "notes.txt", "step-00000000000x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000000007").write_text("no folder")
    store = save(tmp_path, 1, 2, keep_last=1)
    assert_newest_good(store, 2)
    assert [info.step for info in store.steps()] == [2]
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "step-000000000009.old").exists()


def test_the_manifest_says_what_was_saved(place):
    metrics = {"loss": 0.25, "diverged": math.nan, "worst": math.inf, "counted": np.float32(2)}
    with Store(str(place)).open_for_writing() as writer:
        location = writer.write(snapshot(7, metrics, epoch=None))
    if isinstance(place, Path):
        assert location == str(place / "step-000000000007")
    (info,) = Store(str(place)).steps()
    assert info.location == location
    made = info.manifest
    assert (made.step, made.epoch, made.world_size) == (7, None, 2)
    assert made.versions == {"hvdkit": "0", "python": "3"}
    assert math.isnan(made.metrics.pop("diverged"))
    assert made.metrics == {"loss": 0.25, "worst": math.inf, "counted": 2.0}
    assert {name: record.size for name, record in made.files.items()} == {
        file.name: file.stat().st_size
        for file in path_of(location).iterdir()
        if file.name not in ("manifest.json", "committed.json")
    }


def test_one_tensor_can_be_read(place):
    save(place, 1)
    spec, data = snapshot(1).parts["model"].tensors["layer.weight"]
    out = np.zeros(data.size, np.uint8)
    with Store(str(place)).newest_good() as opened:
        assert opened.outline.specs["model"]["layer.weight"] == spec
        opened.read("model", "layer.weight", out)
        np.testing.assert_array_equal(out, data)
        with pytest.raises(ValueError, match="has 140 bytes, not 3"):
            opened.read("model", "layer.weight", out[:3])
        with pytest.raises(CheckpointError, match="has no tensors of part 'loop'; .*model"):
            opened.stream("loop")
        with pytest.raises(CheckpointError, match="has no part 'gone'; it has model, optimizer"):
            opened.outline.tree("gone")


@pytest.mark.parametrize("way", ["stream", "pieces"])
def test_nothing_is_read_ahead_once_a_step_is_closed(place, monkeypatch, way):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 32)
    save(place, 1)
    before = set(threading.enumerate())
    with Store(str(place)).newest_good() as opened:
        if way == "stream":
            unfinished = opened.stream("model")
            unfinished.read_into(np.empty(1, np.uint8))
        else:
            unfinished = opened.pieces("model")
            next(unfinished)
        assert _readers_beyond(before)
    # The caller still has the reader.
    assert unfinished is not None
    assert not _readers_beyond(before)


def _readers_beyond(before):
    new = set(threading.enumerate()) - before
    return {thread for thread in new if thread.name.startswith("hvdkit-checkpoint-read")}


def test_the_outline_goes_to_other_ranks_as_bytes(place):
    save(place, 3)
    with Store(str(place)).newest_good() as opened:
        assert Outline.from_bytes(opened.outline.to_bytes()) == opened.outline


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [4, 5, 6]),
        ({"keep_last": 1, "keep_best": KeepBest("loss")}, [2, 6]),
        *(
            pytest.param(*each, marks=pytest.mark.long_with("s3"))
            for each in [
                ({"keep_last": 1}, [6]),
                ({"keep_last": None}, [1, 2, 3, 4, 5, 6]),
                ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
                ({"keep_last": 2, "keep_best": [KeepBest("loss", "max", 2)]}, [1, 3, 5, 6]),
            ]
        ),
    ],
)
def test_retention(place, settings, steps):
    losses = {1: 9.0, 2: 0.5, 3: 8.0, 4: 1.0, 5: 2.0, 6: math.nan}
    store = Store(str(place), **settings)
    with store.open_for_writing() as writer:
        for step, loss in losses.items():
            writer.write(snapshot(step, {"loss": loss}))
    assert [info.step for info in store.steps()] == steps
    assert len(names(place)) == len(steps)


def test_a_damaged_step_does_not_count_as_kept(place):
    store = save(place, 1, 2, 3, keep_last=3)
    (step_folder(store, 3) / "state.json").unlink()
    save(place, 4, keep_last=3)
    assert [info.step for info in store.steps()] == [1, 2, 4]


def test_a_run_that_went_back_continues_from_its_newest_step(place):
    """Step 600 is saved after step 2000 in the same run: the newest step is the one saved last."""
    store = save(place, 500, 1000, 2000, keep_last=3)
    with store.newest_good(500) as opened:
        assert_holds(opened, 500)
    save(place, 600, keep_last=3)
    assert_newest_good(store, 600)
    assert [info.step for info in store.steps()] == [1000, 2000, 600]


def test_a_step_that_is_saved_again_replaces_the_older_one(place):
    store = save(place, 1, 2)
    with store.open_for_writing() as writer:
        location = writer.write(snapshot(1, {"again": 1.0}))
    assert [info.step for info in store.steps()] == [2, 1]
    assert store.steps()[-1].location == location
    with store.newest_good(1) as opened:
        assert opened.manifest.metrics == {"again": 1.0}
    save(place, 1)
    assert [name[:17] for name in sorted(names(place))] == [
        *("step-000000000001", "step-000000000002"),
    ]
    if isinstance(place, Path):
        # The new step has the name of the step that it replaced.
        assert location == str(place / "step-000000000001")
        assert names(place).count("step-000000000001") == 1
    assert [info.step for info in store.steps()] == [2, 1]


def test_each_run_has_its_own_steps(place):
    store = save(place, 100, 200, 300, keep_last=2)
    with store.open_for_writing(new_run=True) as writer:
        for step in (1, 2, 200):
            writer.write(snapshot(step))
    # Each run keeps its newest two steps. The step 200 of the older run is not replaced.
    assert [info.step for info in store.steps()] == [200, 300, 2, 200]
    assert [info.step for info in of_older_runs(store)] == [200, 300]
    assert [info.step for info in prunable(store, Retention(1))] == [2]
    *_, other, newest = (path_of(info.location) for info in store.steps())
    cut(newest / "model.safetensors", 10)
    with pytest.raises(CheckpointError, match="step 200 in .* is damaged"):
        store.newest_good(200)
    assert_newest_good(store, 2)
    # Whichever file is damaged, no step of the older run is opened instead.
    for file in ("model.safetensors", "manifest.json"):
        cut(other / file, 10)
        with pytest.raises(CheckpointError, match="none of the 1 steps of run 2 in .* is good"):
            store.newest_good()
        assert prunable(store, Retention(1), older_runs=True) == []
        assert [name[-len(newest.name) :] for name in store.quarantined()] == [newest.name]
    with store.newest_good(300) as opened:
        assert_holds(opened, 300)
    with store.newest_good(run=1) as opened:
        assert_holds(opened, 300)
    with store.newest_good(200, run=1) as opened:
        assert_holds(opened, 200)
    with pytest.raises(
        UsageError, match="there is no step 2 of run 1 .*expected one of: 2 of run 2"
    ):
        store.newest_good(2, run=1)
    # The number of a run is not used again.
    remove(other)
    with store.open_for_writing(new_run=True) as writer:
        assert writer.run == 3


@pytest.mark.parametrize("how", ["again", "deleted"])
def test_a_step_that_a_live_writer_replaces_while_it_is_read(tmp_path, monkeypatch, how):
    store = save(tmp_path, 1, 2, keep_last=1 if how == "deleted" else 2)
    done = []

    def before(step, file):
        if step == "read" and file == "optimizer.safetensors" and not done:
            done.append(step)
            save(tmp_path, 2 if how == "again" else 3, keep_last=1 if how == "deleted" else 2)

    monkeypatch.setattr(disk, "before_step", before)
    with store.newest_good() as opened:
        # A step that was opened before it was deleted is also good.
        assert opened.manifest.step in (2, 3)
    assert done
    assert store.quarantined() == []
    done.clear()
    assert store.verify(2 if how == "again" else 3) == []
    assert store.quarantined() == []


def test_a_step_that_is_replaced_between_listing_and_reading(place, monkeypatch):
    store = save(place, 1, 2)
    examine = reading.examine
    done = []

    def replaced(*arguments, **options):
        if not done:
            done.append(arguments)
            save(place, 3)
            remove(step_folder(store, 2))
        return examine(*arguments, **options)

    monkeypatch.setattr("hvdkit.checkpoint.store.examine", replaced)
    with store.newest_good() as opened:
        assert opened.manifest.step == 3
    assert store.quarantined() == []


def test_a_run_whose_newest_manifest_cannot_be_read_is_not_continued(tmp_path, monkeypatch):
    """The commit number of this step is not known, so a new step could get a lower one."""
    store = save(tmp_path, 1, 2)
    preadv = os.preadv

    def broken(descriptor, buffers, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("2/manifest.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(disk, "_READ_AGAIN_SECONDS", 0)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="step-000000000002 in .*Input/output error"):
        store.open_for_writing()
    monkeypatch.undo()
    save(tmp_path, 3)


# Only a folder has links.
@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.long_with("s3"))])
def test_continuing_from_an_older_step_begins_a_run_with_it(place, monkeypatch, links):
    store = save(place, 1, 2, 3)
    with store.newest_good(2) as opened:
        base = opened.manifest
    if not links:

        def refuse(*_, **__):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    with store.open_for_writing() as writer:
        writer.continue_from(base)
        assert writer.run == 2
    # Before anything new is saved.
    assert_newest_good(store, 2)
    assert [info.step for info in store.steps()] == [1, 2, 3, 2]
    assert store.verify(3) == []
    with store.open_for_writing() as writer:
        with store.newest_good() as opened:
            writer.continue_from(opened.manifest)
        writer.write(snapshot(4))
    assert [info.step for info in store.steps()] == [1, 2, 3, 2, 4]
    assert [info.step for info in of_older_runs(store)] == [1, 2, 3]
    assert any(name.startswith("step-000000000004-run2") for name in names(place))


def test_continuing_from_a_step_that_was_deleted_meanwhile(place, caplog):
    store = save(place, 1, 2, 3)
    with store.newest_good(2) as opened:
        base = opened.manifest
    remove(step_folder(store, 2))
    with store.open_for_writing() as writer:
        writer.continue_from(base)
        writer.write(snapshot(5))
    assert "step 2, which was restored, was deleted from" in caplog.text
    assert [info.step for info in store.steps()] == [1, 3, 5]
    assert_newest_good(store, 5)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nothing://bucket/run", "is nothing://bucket/run; expected a path, or a URL that fsspec"),
        ("s3://", "is s3://; expected a path, or a URL that fsspec knows"),
        ("https://host/bucket/run", "is https://host/bucket/run; expected a path, or a URL"),
        ("s3://key:secret@bucket/run", "s3://key:.*@bucket/run has a password"),
        ("simplecache::s3://bucket/run", "expected a path, or a URL that fsspec knows"),
        (
            "oci://name:secret@bucket/run",
            "URL is oci://name:...@bucket/run: .*To do: install",
        ),
    ],
)
def test_a_url_that_cannot_be_used(place, said):
    with pytest.raises(UsageError, match=said):
        Store(place).steps()


def test_a_url_of_a_folder(tmp_path):
    assert Store(f"file://{tmp_path}").location == str(tmp_path)
    assert Store(f"FILE://{tmp_path}").location == str(tmp_path)
    with pytest.raises(UsageError, match="storage_options .* are for URLs"):
        Store(tmp_path, storage_options={"key": "x"})
    for place in (Path("s3://bucket/run"), "s3:/bucket/run"):
        with pytest.raises(UsageError, match="is s3:/bucket/run, a URL with only one slash"):
            Store(place)
    with pytest.raises(UsageError, match="folder is an empty string"):
        Store("")
    with pytest.raises(UsageError, match="expected an absolute path, such as file:///a/b"):
        Store("file://a/b")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": -1}, "step is -1; expected 0 to 999999999999"),
        ({"step": 10**12}, "expected 0 to"),
        ({"parts": {"../x": EncodedPart(1)}}, "has the name '../x'; expected a letter and up to"),
        ({"parts": {"": EncodedPart(1)}}, "has the name ''"),
        ({"metrics": {"loss": "low"}}, "the metric 'loss' is 'low'; expected a number"),
        ({"metrics": {"loss": None}}, "the metric 'loss' is None; expected a number"),
    ],
)
def test_invalid_snapshots(change, said):
    with pytest.raises(UsageError, match=said):
        dataclasses.replace(snapshot(1), **change)


def test_an_invalid_snapshot_leaves_no_files(place):
    store = save(place, 1)
    wrong = EncodedPart({"$tensor": "x"}, {"x": (TensorSpec("F4", ()), np.zeros(16, np.uint8))})
    with store.open_for_writing() as writer:
        with pytest.raises(UsageError, match="dtype is F4"):
            writer.write(dataclasses.replace(snapshot(2), parts={"model": wrong}))
        writer.write(Snapshot(3, None, {}, {}, {}, [b"{}"]))
    assert leftovers(place) == []
    with store.newest_good() as opened:
        assert opened.manifest.step == 3
        assert opened.outline.trees == {}


@pytest.mark.parametrize(
    ("limit", "most", "said"),
    [
        ("MAX_JSON_BYTES", 100, r"state.json would have \d+ bytes; expected at most"),
        ("MAX_JSON_VALUES", 20, r"state.json would have more than 20 values; expected"),
    ],
)
def test_more_json_than_can_be_read_is_not_written(place, monkeypatch, limit, most, said):
    store = save(place, 1)
    with (
        monkeypatch.context() as patch,
        store.open_for_writing() as writer,
    ):
        patch.setattr(manifest, limit, most)
        with pytest.raises(UsageError, match=said):
            writer.write(snapshot(2))
    assert_newest_good(store, 1)


def test_a_text_with_many_commas_is_one_value(place, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_JSON_VALUES", 1000)
    store = save(place, 1)
    text = EncodedPart(tree.encode({"table": "[{,\n" * 5000}, "metadata")[0])
    with store.open_for_writing() as writer:
        writer.write(dataclasses.replace(snapshot(2), parts={"metadata": text}))
    with store.newest_good() as opened:
        assert opened.outline.tree("metadata") == {"table": "[{,\n" * 5000}


@pytest.mark.parametrize("field", ["run", "commit"])
def test_a_step_of_others_with_the_last_number(tmp_path, field):
    store = save(tmp_path, 1)
    path = tmp_path / "step-000000000001" / "manifest.json"
    limit = {"run": manifest.MAX_RUN, "commit": manifest.MAX_COMMIT}[field]
    made = dataclasses.replace(
        manifest.Manifest.from_bytes(path.read_bytes()), **{field: limit - 1}
    )
    path.write_bytes(made.to_bytes())
    with (
        store.open_for_writing(new_run=True) as writer,
        pytest.raises(CheckpointError, match="has a number that hvdkit does not write: move it"),
    ):
        writer.write(snapshot(2))
    assert [info.step for info in store.steps()] == [1]


def test_a_folder_that_others_have_filled_with_steps(place, monkeypatch):
    store = save(place, 1, 2, 3)
    values = sum(info.manifest.values for info in store.steps())
    monkeypatch.setattr(storage, "_MOST_VALUES", values + 3 * storage._ENTRY_VALUES)
    assert [info.step for info in store.steps()] == [1, 2, 3]
    monkeypatch.setattr(storage, "_MOST_VALUES", values + 2 * storage._ENTRY_VALUES)
    with pytest.raises(CheckpointError, match="the list of steps takes too much memory"):
        store.steps()
