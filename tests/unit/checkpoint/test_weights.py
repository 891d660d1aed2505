"""A model's weights as safetensors files."""

import errno
import json
import os
import sys
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open

from hvdkit import cli
from hvdkit.checkpoint import tensors, weights
from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.step_files import EncodedPart, Snapshot
from hvdkit.checkpoint.store import Store
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.torch.checkpoint import export as export_for_torch
from tests.unit.checkpoint.material import save, step_folder
from tests.unit.launch.commands import execute


def stored(folder, tree, specs, others=None):
    """Save a model. Return the store and the contents of its tensors."""
    random = np.random.default_rng(1)
    contents = {
        name: (spec, random.integers(0, 256, tensors.nbytes(spec), np.uint8))
        for name, spec in specs.items()
    }
    parts = {"model": EncodedPart(tree, contents), **(others or {})}
    store = Store(str(folder))
    with store.open_for_writing() as writer:
        writer.write(Snapshot(7, None, {}, {"torch": "2"}, parts, [b"{}"]))
    return store, contents


def read(file):
    """Return name -> dtype, shape and bytes of each tensor; and the metadata."""
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    data = np.fromfile(file, np.uint8)

    def read_into(out, offset):
        out[:] = data[offset : offset + out.size]

    begin, specs = tensors.read_header(read_into, data.size, str(file))
    places = tensors.spans(specs)
    return {
        name: (spec, data[begin + places[name][0] : begin + places[name][1]].tobytes())
        for name, spec in specs.items()
    }, metadata


def expected(contents, *names):
    return {name: (contents[name][0], contents[name][1].tobytes()) for name in names}


SPECS = {name: TensorSpec("F32", (10,)) for name in ("a", "b", "c", "d")} | {
    "big": TensorSpec("F64", (20,)),
    "mask": TensorSpec("BOOL", (3,)),
    "extra.x": TensorSpec("F32", (2,)),
}
TREE = {
    "a": {"$tensor": "a"},
    "b": {"$tensor": "b"},
    "c": {"$tensor": "c"},
    "extra": {"x": {"$tensor": "extra.x"}},
    "d": {"$tensor": "d"},
    "big": {"$tensor": "big"},
    "mask": {"$tensor": "mask"},
    "(tied)": {"head": "a", "format": "d"},
}
NAMES = ("a", "b", "c", "d", "big", "mask")


def test_one_file(tmp_path, capsys, caplog):
    store, contents = stored(tmp_path / "place", TREE, SPECS)
    target = tmp_path / "model.safetensors"
    target.write_text("the old one")
    assert cli.main(["checkpoint", "export", store.location, str(target)]) == 0
    assert f"wrote step 7 to {target}" in capsys.readouterr().out
    found, metadata = read(target)
    assert found == expected(contents, *NAMES)
    assert metadata == {"head": "a", "format": "pt"}
    assert "not exported, because a safetensors file holds tensors only: extra" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "place"]
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("how", [["out"], ["out.v1.2", "--format", "huggingface"]])
def test_a_folder_of_one_file(tmp_path, capsys, how):
    store, contents = stored(tmp_path / "place", TREE, SPECS)
    target = tmp_path / how[0]
    assert cli.main(["checkpoint", "export", store.location, str(target), *how[1:]]) == 0
    assert "add your model's config.json to the folder" in capsys.readouterr().out
    assert [p.name for p in target.iterdir()] == ["model.safetensors"]
    assert read(target / "model.safetensors")[0] == expected(contents, *NAMES)


def test_a_folder_of_several_files(tmp_path):
    store, contents = stored(tmp_path / "place", TREE, SPECS)
    target = tmp_path / "out"
    with store.newest_good() as opened:
        weights.export_folder(opened, target, shard_bytes=80)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 20 * 8 + 4 * 40 + 3}
    assert index["weight_map"].keys() == set(NAMES)
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    assert sorted(p.name for p in target.iterdir()) == [*files, "model.safetensors.index.json"]
    again, tied = {}, {}
    for file in files:
        found, metadata = read(target / file)
        assert {index["weight_map"][name] for name in found} == {file}
        assert (
            sum(map(tensors.nbytes, (spec for spec, _ in found.values()))) <= 80 or len(found) == 1
        )
        assert metadata["format"] == "pt"
        again |= found
        tied |= {name: holder for name, holder in metadata.items() if name != "format"}
    assert again == expected(contents, *NAMES)
    assert tied == {"head": "a"}


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_an_existing_target_is_not_replaced_by_a_folder(tmp_path, capsys, kind):
    store, _ = stored(tmp_path / "place", TREE, SPECS)
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to("nowhere")
    assert cli.main(["checkpoint", "export", store.location, str(target)]) == 2
    assert f"{target} exists; expected the name of a new folder" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "place"]


@pytest.mark.parametrize("export", [weights.export_file, weights.export_folder])
def test_a_failed_export_leaves_no_files(tmp_path, monkeypatch, export):
    store = save(tmp_path / "place", 1)
    with store.newest_good() as opened:
        path = step_folder(store, 1) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(Damaged, match="is not what was written"):
            export(opened, tmp_path / "out")
    with save(tmp_path / "b", 1).newest_good() as opened:
        with pytest.raises(HvdkitError, match="cannot write .*gone/out: No such file"):
            export(opened, tmp_path / "gone" / "out")
        monkeypatch.setattr(weights.os, "fsync", _full)
        with pytest.raises(HvdkitError, match="cannot write .*out: No space left on device"):
            export(opened, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "place"]


def _full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": None}, r"has 0 models \(none\)"),
        ({"model-a": EncodedPart({})}, r"has 2 models \(model, model-a\).* \*.pt file"),
        (
            "complex",
            r"x has the dtype complex128, which safetensors does not have. Export to a \*.pt",
        ),
    ],
)
def test_checkpoints_that_cannot_be_exported(tmp_path, change, said):
    if change == "complex":
        tree, specs = {"x": {"$tensor": ["x", "C128"]}}, {"x": TensorSpec("C128", (3,))}
        store, _ = stored(tmp_path / "place", tree, specs)
    else:
        parts = {name: part for name, part in ({"model": EncodedPart({})} | change).items() if part}
        store = Store(str(tmp_path / "place"))
        with store.open_for_writing() as writer:
            writer.write(Snapshot(7, None, {}, {}, parts, [b"{}"]))
    with store.newest_good() as opened, pytest.raises(UsageError, match=said):
        weights.export_file(opened, tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ([{"$tensor": "x"}], "is not an object"),
        ({"$dict": [[5, {"$tensor": "x"}]]}, "is not an object"),
        ({"x": {"$tensor": "x"}, "(tied)": ["x"]}, "is not an object"),
        ({"x": {"$tensor": "x"}, "(tied)": {"y": ["x"]}}, "is not an object"),
        ({"x": {"$tensor": "x"}, "(tied)": {"y": "z"}}, "of missing tensors"),
    ],
)
def test_the_model_of_a_checkpoint_that_others_have_made(tmp_path, tree, said):
    name = {list: "0", dict: "5" if "$dict" in tree else "x"}[type(tree)]
    text = json.dumps(tree).replace('"$tensor": "x"', f'"$tensor": "{name}"')
    store, _ = stored(tmp_path / "place", json.loads(text), {name: TensorSpec("F32", (3,))})
    with store.newest_good() as opened:
        for export in (weights.export_file, weights.export_folder, export_for_torch):
            with pytest.raises(Damaged, match=said):
                export(opened, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_warning_of_the_command_line_has_no_control_characters(tmp_path):
    store, _ = stored(tmp_path / "place", {"\x1b]0;x\x07": 1}, {})
    words = ["checkpoint", "export", store.location, str(tmp_path / "x.safetensors")]
    done = execute([sys.executable, "-m", "hvdkit", *words])
    assert done.returncode == 0
    assert "tensors only: \ufffd]0;x\ufffd\n" in done.stderr


@pytest.mark.parametrize("export", [weights.export_file, weights.export_folder])
def test_a_large_model_needs_little_memory(tmp_path, export):
    specs = {name: TensorSpec("F32", (20_000_000,)) for name in "ab"}
    store, contents = stored(tmp_path / "place", {n: {"$tensor": n} for n in "ab"}, specs)
    with store.newest_good() as opened:
        tracemalloc.start()
        try:
            export(opened, tmp_path / "out")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 60_000_000
    out = tmp_path / "out"
    found, _ = read(out / "model.safetensors" if out.is_dir() else out)
    assert found == expected(contents, "a", "b")


def test_a_model_without_tensors(tmp_path):
    store, _ = stored(tmp_path / "place", {"x": 1}, {})
    with store.newest_good() as opened:
        weights.export_file(opened, tmp_path / "x.safetensors")
    assert read(tmp_path / "x.safetensors")[0] == {}
