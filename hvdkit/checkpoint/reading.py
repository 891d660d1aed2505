"""Reading a step: only what the manifest lists, only plain files, and each checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import xxhash

from hvdkit.checkpoint import manifest, tensors, tree
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.manifest import FileRecord, Manifest
from hvdkit.checkpoint.state import TensorSpec, Tree
from hvdkit.checkpoint.storage import StepFiles
from hvdkit.checkpoint.tensors import ReadInto

#: What is read and hashed at once: stays in the processor's cache between the two.
_CHUNK_BYTES = 1_000_000


Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """What is wrong with one file of a step."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class Outline:
    """All of a step but its tensors' content: small, and what rank 0 tells the others.

    Attributes:
        manifest: what the step says of itself.
        trees: part -> its JSON form.
        specs: part -> tensor name -> dtype and shape, in the order in which the tensors lie in
            the part's file. They lie there without gaps. The dtypes are those of the tensors, of
            which a file may have others (`dtypes.PAIRS`).
        ranks: each rank's JSON form.
    """

    manifest: Manifest
    trees: Mapping[str, Any]
    specs: Mapping[str, Mapping[str, TensorSpec]]
    ranks: tuple[Any, ...]

    def tree(self, part: str) -> Tree:
        """The tree of `part`, with a `TensorSpec` in place of each tensor.

        `tree.encode` of such a tree, or of one with `Tensor`s in their places, names the tensors
        as they are named here.

        Raises:
            CheckpointError: the step has no such part.
        """
        if part not in self.trees:
            raise CheckpointError(
                f"step {self.manifest.step} has no part {part!r}; it has {', '.join(self.trees)}."
            )
        return tree.decode(self.trees[part], self.specs.get(part, {}))

    def rank(self, rank: int) -> Tree:
        """The tree that `rank` saved for itself."""
        return tree.decode(self.ranks[rank], {})

    def to_bytes(self) -> bytes:
        """To be sent to the other ranks."""
        specs = {
            part: [[name, spec.dtype, spec.shape] for name, spec in entries.items()]
            for part, entries in self.specs.items()
        }
        return json.dumps(
            [self.manifest.to_bytes().decode(), self.trees, specs, self.ranks]
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Outline:
        """What `to_bytes` has made."""
        text, trees, specs, ranks = json.loads(data)
        return cls(
            manifest=Manifest.from_bytes(text.encode()),
            trees=trees,
            specs={
                part: {name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in entries}
                for part, entries in specs.items()
            },
            ranks=tuple(ranks),
        )


class OpenCheckpoint:
    """A step that was found whole and good, with its files open. A context manager.

    Attributes:
        outline: all of it but its tensors' content.
        location: its path or URL.

    In a folder it can be read to its end even if the step is removed meanwhile.
    """

    def __init__(self, outline: Outline, files: StepFiles, begins: Mapping[str, int]) -> None:
        self.outline = outline
        self.location = ""
        self._files = files
        self._begins = begins

    @property
    def manifest(self) -> Manifest:
        """What the step says of itself."""
        return self.outline.manifest

    def stream(self, part: str) -> TensorStream:
        """Read the content of the tensors of `part`, in the order of `outline.specs[part]`.

        Raises:
            CheckpointError: the step has no tensors for such a part.
        """
        name = self._file(part)
        read_into = partial(self._files.read_into, name)
        return TensorStream(name, read_into, self._begins[part], self.manifest.files[name])

    def read(self, part: str, name: str, out: np.ndarray) -> None:
        """Copy the content of one tensor into `out`: uint8, contiguous, of its size in bytes.

        What is read is not hashed once more: use `stream` where all is wanted.
        """
        file = self._file(part)
        begin, end = tensors.spans(self.outline.specs[part])[name]
        if out.size != end - begin:
            raise ValueError(f"{part}'s tensor {name} has {end - begin} bytes, not {out.size}")
        self._files.read_into(file, out, self._begins[part] + begin)

    def close(self) -> None:
        """Close the files. May be called again."""
        self._files.close()

    def _file(self, part: str) -> str:
        if part not in self.outline.specs:
            raise CheckpointError(
                f"step {self.manifest.step} has no tensors of a part {part!r}; it has those of "
                f"{', '.join(self.outline.specs) or 'none'}."
            )
        return part + manifest.TENSORS_SUFFIX

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class TensorStream:
    """The tensors' bytes of one part, front to back, hashed once more on their way.

    Attributes:
        size: bytes in all: the sum over the tensors.
    """

    def __init__(self, name: str, read_into: ReadInto, begin: int, record: FileRecord) -> None:
        self.size = record.size - begin
        self._name = name
        self._read_into = read_into
        self._offset = begin
        self._record = record
        header = np.empty(begin, np.uint8)
        read_into(header, 0)
        self._hash = xxhash.xxh3_128(header.data)

    def read_into(self, out: np.ndarray) -> None:
        """Fill `out` (uint8, contiguous) with the next `out.size` bytes.

        Raises:
            Damaged: the file changed since it was verified. With the last byte, the whole file's
                hash has been compared: what `read_into` has returned by then is what was saved.
            ValueError: fewer bytes than that are left.
        """
        if self._offset + out.size > self._record.size:
            left = self._record.size - self._offset
            raise ValueError(f"{out.size} bytes of {self._name} are wanted, and {left} are left")
        for chunk in _chunks(out):
            self._read_into(chunk, self._offset)
            self._hash.update(chunk.data)
            self._offset += chunk.size
        if self._offset == self._record.size and self._hash.hexdigest() != self._record.xxh3_128:
            raise Damaged(self._name, "it has changed since it was verified")


def examine(
    open_step: Callable[[], StepFiles], step: int, progress: Callable[[int], None] | None = None
) -> tuple[OpenCheckpoint | None, list[Problem]]:
    """Read all of a step, and compare it with its manifest.

    Args:
        open_step: opens the step for reading.
        step: the number that the manifest must have.
        progress: called with the number of bytes read since the call before.

    Returns:
        The step, opened, and no problems; or None, and what is wrong.

    Raises:
        CheckpointError: it cannot be read, for a reason that says nothing about it.
    """
    with ExitStack() as resources:
        try:
            files = open_step()
            resources.callback(files.close)
            found = read_manifest(files, step)
            problems = list(_compare(files, found, progress))
            if not problems:
                opened = _opened(found, files)
                resources.pop_all()
                return opened, []
        except Damaged as error:
            problems = [Problem(error.file, error.reason)]
    return None, problems


def read_manifest(files: StepFiles, step: int) -> Manifest:
    """Read the manifest of a step.

    Raises:
        Damaged: there is none, or it is not that of `step`, or not as it was written.
        CheckpointError: it cannot be read, or is of a later version.
    """
    size = files.open(manifest.NAME)
    if size > manifest.MAX_MANIFEST_BYTES:
        raise Damaged(manifest.NAME, f"it has {size} bytes, more than a manifest can have")
    found = Manifest.from_bytes(_content(files, manifest.NAME, size))
    if found.step != step:
        raise Damaged(manifest.NAME, f"it is that of step {found.step}")
    return found


def open_file(files: StepFiles, name: str, record: FileRecord) -> None:
    """Open a file that the manifest lists.

    Raises:
        Damaged: it is missing, or has another size.
        CheckpointError: it cannot be opened, for a reason that says nothing about it.
    """
    size = files.open(name)
    if size != record.size:
        raise Damaged(name, f"it has {size} bytes instead of {record.size}")


def _compare(
    files: StepFiles, found: Manifest, progress: Callable[[int], None] | None
) -> Iterator[Problem]:
    """Open and hash what the manifest lists; yields what is wrong with it."""
    # First all are opened: the step may be deleted while they are read.
    missing = False
    for name, record in found.files.items():
        try:
            open_file(files, name, record)
        except Damaged as error:
            missing = True
            yield Problem(error.file, error.reason)
    if missing:
        return
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    for name, record in found.files.items():
        try:
            state = xxhash.xxh3_128()
            for offset in range(0, record.size, _CHUNK_BYTES):
                chunk = buffer[: min(_CHUNK_BYTES, record.size - offset)]
                files.read_into(name, chunk, offset)
                state.update(chunk.data)
                if progress:
                    progress(chunk.size)
            if state.hexdigest() != record.xxh3_128:
                raise Damaged(name, "its content is not what was written: its hash differs")
        except Damaged as error:
            yield Problem(error.file, error.reason)


def _content(files: StepFiles, name: str, size: int) -> bytes:
    content = np.empty(size, np.uint8)
    files.read_into(name, content, 0)
    return content.tobytes()


def _json(files: StepFiles, found: Manifest, name: str) -> Any:
    """The content of a file that is JSON."""
    if name not in found.files:
        raise Damaged(name, "the manifest does not list it")
    size = found.files[name].size
    if size > manifest.MAX_JSON_BYTES:
        raise Damaged(
            name, f"it has {size} bytes; expected at most {manifest.MAX_JSON_BYTES} of JSON"
        )
    content = _content(files, name, size)
    if manifest.json_values(content, manifest.MAX_JSON_VALUES) > manifest.MAX_JSON_VALUES:
        raise Damaged(name, f"it has more than {manifest.MAX_JSON_VALUES} values, as none has")
    return manifest.parse_json(name, content)


def _opened(found: Manifest, files: StepFiles) -> OpenCheckpoint:
    """The step that `files` are, if their contents fit together."""
    trees, ranks = (_json(files, found, name) for name in (manifest.STATE, manifest.RANKS))
    begins, specs = {}, {}
    for part in found.parts_with_tensors:
        name = part + manifest.TENSORS_SUFFIX
        begins[part], specs[part] = tensors.read_header(
            partial(files.read_into, name), found.files[name].size, name
        )
    outline = Outline(found, trees, specs, tuple(ranks) if isinstance(ranks, list) else ())
    _check(manifest.RANKS, lambda: _check_ranks(outline, ranks))
    outline = replace(outline, specs=_check(manifest.STATE, lambda: _checked_specs(outline)))
    return OpenCheckpoint(outline, files, begins)


def _chunks(out: np.ndarray) -> Iterator[np.ndarray]:
    return (out[at : at + _CHUNK_BYTES] for at in range(0, out.size, _CHUNK_BYTES))


def _check(name: str, check: Callable[[], Result]) -> Result:
    try:
        return check()
    except (ValueError, RecursionError) as error:
        raise Damaged(name, f"it is not what hvdkit writes ({error})") from error


def _check_ranks(outline: Outline, ranks: Any) -> None:
    if not isinstance(ranks, list):
        raise ValueError("not a list with an entry for each rank")
    for rank in range(len(ranks)):
        outline.rank(rank)


def _checked_specs(outline: Outline) -> dict[str, dict[str, TensorSpec]]:
    """The dtypes and shapes of the tensors, where the files have others, in the same order.

    Raises:
        ValueError: the trees are not what hvdkit writes, or do not fit the files.
    """
    checked: dict[str, dict[str, TensorSpec]] = {}
    if not isinstance(outline.trees, dict):
        raise ValueError("not an object with an entry for each part")
    for part in outline.specs:
        if part not in outline.trees:
            raise ValueError(f"it has no part {part}, which has tensors")
    for part, encoded in outline.trees.items():
        manifest.check_part_name(part)
        again, used = tree.encode(outline.tree(part), part)
        stored = outline.specs.get(part, {})
        if used.keys() != stored.keys() or again != encoded:
            raise ValueError(f"the tensors that {part} names are not those in its file")
        if tree.version(used.values()) > outline.manifest.version:
            raise ValueError(f"{part} has tensors that its version of the format does not have")
        if stored:
            checked[part] = {name: tree.spec_of(used[name]) for name in stored}
    return checked
