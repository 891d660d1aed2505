"""Small states to save, and functions that check or change saved steps."""

import json
from pathlib import Path

import numpy as np
import xxhash
from upath import UPath

from hvdkit.checkpoint import chunks, manifest, reading, tensors, tree
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.step_files import EncodedPart, Snapshot, rank_to_bytes
from hvdkit.checkpoint.store import Store

#: part -> a tree. The tensors differ in their sizes: none, one or many elements of 1 to 8 bytes.
TREES = {
    "model": {
        "layer.weight": TensorSpec("F32", (7, 5)),
        "layer.mask": TensorSpec("BOOL", (3,)),
        "layer.half": TensorSpec("BF16", (5,)),
        "empty": TensorSpec("F32", (0, 4)),
        "count": TensorSpec("I64", ()),
    },
    "optimizer": {
        "state": {0: {"step": 3, "exp_avg": TensorSpec("F64", (7, 5))}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}],
    },
    "loop": {"best": float("inf"), "seen": 12},
}


def part(name, seed):
    encoded, specs = tree.encode(TREES[name], name)
    random = np.random.default_rng(seed)
    content = {
        tensor: (spec, random.integers(0, 256, tensors.nbytes(spec), np.uint8))
        for tensor, spec in specs.items()
    }
    return EncodedPart(encoded, content)


def snapshot(step, metrics=None, epoch=1):
    """Return a state that depends only on the arguments."""
    return Snapshot(
        step=step,
        epoch=epoch,
        metrics=metrics or {},
        versions={"hvdkit": "0", "python": "3"},
        parts={name: part(name, 1000 * step + i) for i, name in enumerate(TREES)},
        ranks=[
            rank_to_bytes(tree.encode({"rng": bytes([rank, step % 256])}, "rank")[0], 2)
            for rank in range(2)
        ],
    )


def save(folder, *steps, **settings):
    """Write steps, and return the store."""
    store = Store(str(folder), **settings)
    with store.open_for_writing() as writer:
        for step in steps:
            writer.write(snapshot(step))
    return store


def content(opened):
    """Return part -> tensor -> its bytes, read as in a restore."""
    found = {}
    for name, specs in opened.outline.specs.items():
        stream = opened.stream(name)
        data = np.empty(stream.size, np.uint8)
        stream.read_into(data)
        found[name] = {
            tensor: data[begin:end].tobytes()
            for tensor, (begin, end) in tensors.spans(specs).items()
        }
    return found


def assert_holds(opened, step):
    """Assert that `opened` has the bits that were saved as `step`."""
    saved = snapshot(step)
    assert opened.manifest.step == step
    assert content(opened) == {
        name: {tensor: data.tobytes() for tensor, (_, data) in part.tensors.items()}
        for name, part in saved.parts.items()
        if part.tensors
    }
    assert {name: opened.outline.tree(name) for name in TREES} == TREES
    assert reading.rank_tree(opened.ranks[1]) == {"rng": bytes([1, step % 256])}


def assert_newest_good(store, step):
    with store.newest_good() as opened:
        assert_holds(opened, step)


def path_of(location):
    """Return the path object for a path or a URL. Both have the same methods."""
    if "://" not in str(location):
        return Path(location)
    return UPath(location, use_listings_cache=False)


def leftovers(place):
    """Return the names of all files except steps, the lock and the lease of the last writer."""
    if isinstance(place, Path):
        return [
            p.name for p in place.iterdir() if not p.name.startswith("step-") and p.name != ".lock"
        ]
    steps = {entry.name for entry in Store(str(place)).entries()} | {
        *Store(str(place)).quarantined()
    }
    found = [f"{p.parent.name}/{p.name}" for p in place.glob("*/*")]
    known = {f"steps/{name}" for name in steps}
    *_, last = sorted(name for name in found if name.startswith("writers/0")) or [""]
    return [name for name in found if name not in known and name != last]


def names(place):
    """Return the names of the steps' folders."""
    if not isinstance(place, Path):
        place = place / "steps"
    return [p.name for p in place.iterdir() if p.name.startswith("step-")]


def step_folder(store, step):
    (found,) = (info.location for info in store.steps() if info.step == step)
    return path_of(found)


def remove(folder):
    """Remove a step's folder and its files, as a user may by hand."""
    for path in folder.iterdir():
        path.unlink()
    if isinstance(folder, Path):
        folder.rmdir()


def before_commit(monkeypatch, writer, act):
    """Call `act` after a writer has read a step back, and before it commits the step."""
    read_back = writer._read_back

    def and_act(*arguments):
        read_back(*arguments)
        act()

    monkeypatch.setattr(writer, "_read_back", and_act)


def cut(path, size):
    """Truncate a file."""
    path.write_bytes(path.read_bytes()[:size])


def seal(fields):
    """Return the bytes of a manifest with any `fields`, and the correct hash."""
    text = fields if isinstance(fields, str) else json.dumps(fields)
    body = text.removesuffix("}").rstrip().encode()
    return body + (manifest._SEAL % xxhash.xxh3_128_hexdigest(body)).encode()


def file_record(data):
    """Return a file's entry in the manifest."""
    size = chunks.CHUNK_BYTES
    pieces = [data[at : at + size] for at in range(0, max(len(data), 1), size)]
    hashes = [xxhash.xxh3_128_hexdigest(piece) for piece in pieces]
    return {"bytes": len(data), "chunk_bytes": size, "xxh3_128": hashes}


def as_version_1(folder):
    """Turn a step into one of hvdkit 0.x, whose manifests have one hash for each file."""
    path = folder / manifest.NAME
    fields = json.loads(path.read_bytes())
    del fields["xxh3_128"]
    fields["version"] = 1
    ranks = (folder / manifest.RANKS).read_text().splitlines()
    (folder / manifest.RANKS_IN_A_LIST).write_text(f"[{', '.join(ranks)}]")
    (folder / manifest.RANKS).unlink()
    del fields["files"][manifest.RANKS]
    fields["files"][manifest.RANKS_IN_A_LIST] = None
    fields["files"] = {
        name: {
            "bytes": (folder / name).stat().st_size,
            "xxh3_128": xxhash.xxh3_128_hexdigest((folder / name).read_bytes()),
        }
        for name in fields["files"]
    }
    path.write_bytes(seal(fields))


def forge(folder, files=None, edit=None):
    """Put `files` (name -> content) into a step's folder, with correct hashes in the manifest."""
    path = folder / manifest.NAME
    fields = json.loads(path.read_bytes())
    del fields["xxh3_128"]
    for name, data in (files or {}).items():
        (folder / name).write_bytes(data)
        fields["files"][name] = file_record(data)
    if edit:
        edit(fields)
    path.write_bytes(seal(fields))


class Steps:
    """Call `act(number, operation, file)` before each file operation, and record the operations."""

    def __init__(self, monkeypatch, act=lambda number, step, file: None):
        self.seen = []
        self._act = act
        monkeypatch.setattr(disk, "before_step", self._before)

    def _before(self, step, file):
        self.seen.append((step, file))
        self._act(len(self.seen), step, file)
