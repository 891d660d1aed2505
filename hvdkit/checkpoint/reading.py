"""Open, verify and read a step.

`examine` opens a step and returns an `OpenCheckpoint`, or the problems of a damaged step. Only
regular files that the manifest lists are read, and each is compared with its hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from hvdkit.checkpoint import manifest, tensors, tree
from hvdkit.checkpoint.chunks import ChunkedFile, FileRecord
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.state import TensorSpec, Tree
from hvdkit.checkpoint.storage import StepFiles

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outline:
    """All of a step except the content of its tensors. Rank 0 broadcasts it.

    Attributes:
        manifest: the description of the step.
        trees: part -> its JSON form.
        specs: part -> tensor name -> dtype and shape, in the order of the part's file, where the
            tensors are stored without gaps. The dtypes are those of the tensors; a file may store
            another dtype (`dtypes.PAIRS`).
        begins: part -> the offset of the first tensor in the part's file, in bytes.
        rank_parts: the names of the parts that have their own state on each rank.
    """

    manifest: Manifest
    trees: Mapping[str, Any]
    specs: Mapping[str, Mapping[str, TensorSpec]]
    begins: Mapping[str, int]
    rank_parts: frozenset[str]

    def tree(self, part: str) -> Tree:
        """Return the tree of `part`, with a `TensorSpec` in place of each tensor.

        `tree.encode` gives the tensors of this tree the same names again.

        Raises:
            CheckpointError: the step has no such part.
        """
        if part not in self.trees:
            raise CheckpointError(
                f"step {self.manifest.step} has no part {part!r}; it has {', '.join(self.trees)}."
            )
        return tree.decode(self.trees[part], self.specs.get(part, {}))

    def file(self, part: str) -> FileRecord:
        """Return the record of the file with the tensors of `part`."""
        return self.manifest.files[part + manifest.TENSORS_SUFFIX]

    def to_bytes(self) -> bytes:
        """Serialize the outline, for the other ranks."""
        specs = {
            part: [[name, spec.dtype, spec.shape] for name, spec in entries.items()]
            for part, entries in self.specs.items()
        }
        return json.dumps(
            [
                self.manifest.to_bytes().decode(),
                self.trees,
                specs,
                self.begins,
                sorted(self.rank_parts),
            ]
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Outline:
        """Deserialize an outline."""
        text, trees, specs, begins, rank_parts = json.loads(data)
        return cls(
            manifest=Manifest.from_bytes(text.encode()),
            trees=trees,
            specs={
                part: {name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in entries}
                for part, entries in specs.items()
            },
            begins=begins,
            rank_parts=frozenset(rank_parts),
        )


class OpenCheckpoint:
    """A step with its files open. A context manager.

    Every chunk of a file is compared with its hash before the last byte of the chunk is returned.

    Attributes:
        outline: all of the step except the content of its tensors.
        location: its path or URL.
        ranks: for each rank, the JSON of its own state; see `rank_tree`.

    In a folder, an open step stays readable if it is deleted meanwhile.
    """

    def __init__(self, outline: Outline, files: StepFiles, ranks: Sequence[bytes]) -> None:
        self.outline = outline
        self.location = ""
        self.ranks = ranks
        self._files = files
        # The files, and the readers that read ahead in them.
        self._resources = ExitStack()
        self._resources.callback(files.close)

    @property
    def manifest(self) -> Manifest:
        """The description of the step."""
        return self.outline.manifest

    def stream(self, part: str) -> TensorStream:
        """Return a stream of the tensors of `part`, in the order of `outline.specs[part]`.

        Raises:
            CheckpointError: the step has no tensors for such a part.
        """
        stream = TensorStream(self._file(part), self.outline.begins[part])
        self._resources.callback(stream.close)
        return stream

    def pieces(
        self, part: str, *, padding: int = 0
    ) -> Generator[tuple[int, np.ndarray], None, None]:
        """Read the file of `part` from the chunk of its first tensor on; see `ChunkedFile.pieces`.

        Raises:
            CheckpointError: the step has no tensors for such a part.
        """
        pieces = self._file(part).pieces(self.outline.begins[part], padding=padding)
        self._resources.callback(pieces.close)
        return pieces

    def read(self, part: str, name: str, out: np.ndarray) -> None:
        """Copy the content of one tensor into `out`: uint8, contiguous, of the tensor's size.

        Reads whole chunks: use `stream` to read all tensors.

        Raises:
            Damaged: a chunk with bytes of the tensor differs from its hash.
            CheckpointError: it cannot be read.
        """
        file = self._file(part)
        begin, end = tensors.spans(self.outline.specs[part])[name]
        if out.size != end - begin:
            raise ValueError(f"{part}'s tensor {name} has {end - begin} bytes, not {out.size}")
        file.read(out, self.outline.begins[part] + begin)

    def read_raw(self, name: str, out: np.ndarray, offset: int) -> None:
        """Fill `out` (uint8) with the bytes of a file from `offset` on, without a check.

        Raises:
            CheckpointError: the file cannot be read.
        """
        self._files.read_into(name, out, offset)

    def close(self) -> None:
        """Stop reading ahead and close the files. May be called more than once."""
        self._resources.close()

    def _file(self, part: str) -> ChunkedFile:
        if part not in self.outline.specs:
            raise CheckpointError(
                f"step {self.manifest.step} has no tensors of part {part!r}; it has tensors of "
                f"these parts: {', '.join(self.outline.specs) or 'none'}."
            )
        name = part + manifest.TENSORS_SUFFIX
        return _chunked(self._files, self.manifest, name, self._files.readers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TensorStream:
    """A stream of the bytes of all tensors of a part.

    Args:
        file: the file of the part.
        begin: the offset of the first tensor in the file, in bytes.

    Attributes:
        size: the size of all tensors together, in bytes.
    """

    def __init__(self, file: ChunkedFile, begin: int) -> None:
        self.size = file.size - begin
        self._pieces = file.pieces(begin)
        self._begin = begin
        self._left = np.empty(0, np.uint8)

    def read_into(self, out: np.ndarray) -> None:
        """Fill `out` (uint8, contiguous) with the next `out.size` bytes.

        Raises:
            Damaged: a chunk differs from its hash.
            CheckpointError: it cannot be read now; it may be intact.
            ValueError: fewer bytes are left.
        """
        while out.size:
            if not self._left.size:
                self._left = self._next_piece(out.size)
            count = min(out.size, self._left.size)
            out[:count] = self._left[:count]
            out, self._left = out[count:], self._left[count:]

    def close(self) -> None:
        """Stop reading ahead."""
        self._pieces.close()

    def _next_piece(self, wanted: int) -> np.ndarray:
        for start, content in self._pieces:
            # The first chunk begins with the header.
            piece = content[max(self._begin - start, 0) :]
            if piece.size:
                return piece
        raise ValueError(f"{wanted} more bytes were requested; the stream has ended")


def examine(
    open_step: Callable[[], StepFiles],
    step: int,
    progress: Callable[[int], None] | None = None,
    *,
    whole: bool = True,
) -> tuple[OpenCheckpoint | None, list[Damaged]]:
    """Open a step, and compare it with its manifest.

    Args:
        open_step: opens the step for reading.
        step: the number that the manifest must have.
        progress: called with the number of bytes read since the previous call.
        whole: False: check the files' sizes and all content except the tensors, which are checked
            when they are read.

    Returns:
        The open step and no problems; or None and the problems.

    Raises:
        CheckpointError: it cannot be read now; it may be intact.
    """
    with ExitStack() as resources:
        try:
            files = open_step()
            resources.callback(files.close)
            found = read_manifest(files, step)
            problems = _open_all(files, found)
            if whole and not problems:
                problems = _verified(files, found, progress)
            if not problems:
                opened = _opened(found, files)
                resources.pop_all()
                return opened, []
        except Damaged as error:
            problems = [error]
    return None, problems


def read_manifest(files: StepFiles, step: int) -> Manifest:
    """Read the manifest of a step.

    Raises:
        Damaged: it is missing or damaged, or belongs to another step.
        CheckpointError: it cannot be read, or is of a later version of hvdkit.
    """
    size = files.open(manifest.NAME)
    if size > manifest.MAX_MANIFEST_BYTES:
        raise Damaged(
            manifest.NAME, f"it has {size} bytes; expected at most {manifest.MAX_MANIFEST_BYTES}"
        )
    content = np.empty(size, np.uint8)
    files.read_into(manifest.NAME, content, 0)
    found = Manifest.from_bytes(content.tobytes())
    if found.step != step:
        raise Damaged(manifest.NAME, f"it belongs to step {found.step}, not to step {step}")
    return found


def open_file(files: StepFiles, name: str, record: FileRecord) -> None:
    """Open a file that the manifest lists.

    Raises:
        Damaged: it is missing, or has another size.
        CheckpointError: it cannot be opened now; it may be intact.
    """
    size = files.open(name)
    if size != record.size:
        raise Damaged(name, f"it has {size} bytes instead of {record.size}")


def _open_all(files: StepFiles, found: Manifest) -> list[Damaged]:
    """Open all files that the manifest lists, so that they stay readable if the step is deleted.

    Returns:
        A problem for each file that is missing or has another size.
    """
    problems = []
    for name, record in found.files.items():
        try:
            open_file(files, name, record)
        except Damaged as error:
            problems.append(error)
    return problems


def _verified(
    files: StepFiles, found: Manifest, progress: Callable[[int], None] | None
) -> list[Damaged]:
    """Read all files and compare them with their hashes. Return the problems."""
    problems = []
    for name in found.files:
        try:
            _chunked(files, found, name).verify(progress)
        except Damaged as error:
            problems.append(error)
    return problems


def _chunked(files: StepFiles, found: Manifest, name: str, readers: int = 0) -> ChunkedFile:
    return ChunkedFile(name, found.files[name], partial(files.read_into, name), readers)


def rank_tree(content: bytes) -> Tree:
    """Return the tree of one rank's own state.

    Raises:
        Damaged: it is not valid.
    """
    return _check(
        manifest.RANKS, lambda: tree.decode(manifest.parse_json(manifest.RANKS, content), {})
    )


def _json(files: StepFiles, found: Manifest, name: str) -> Any:
    """Return the content of a JSON file."""
    return manifest.parse_json(name, _content(files, found, name, manifest.MAX_JSON_BYTES))


def _content(files: StepFiles, found: Manifest, name: str, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes."""
    if name not in found.files:
        raise Damaged(name, "the manifest does not list it")
    size = found.files[name].size
    if size > most:
        raise Damaged(name, f"it has {size} bytes; expected at most {most} of JSON")
    content = np.empty(size, np.uint8)
    _chunked(files, found, name).read(content, 0)
    return content.tobytes()


def _ranks(files: StepFiles, found: Manifest) -> list[bytes]:
    """Return the JSON of each rank: lines of a file, or entries of a list in older steps."""
    if manifest.RANKS_IN_A_LIST in found.files:
        ranks = _json(files, found, manifest.RANKS_IN_A_LIST)
        if not isinstance(ranks, list):
            raise Damaged(manifest.RANKS_IN_A_LIST, "it is not a list with an entry for each rank")
        return [json.dumps(rank).encode() for rank in ranks]
    # The number of ranks limits nothing: it is in the manifest, which others may have written.
    content = _content(files, found, manifest.RANKS, manifest.MAX_RANKS_BYTES)
    *lines, rest = content.split(b"\n")
    if rest:
        raise Damaged(manifest.RANKS, "its last line is incomplete")
    for line in lines:
        if len(line) > manifest.MAX_RANK_BYTES:
            raise Damaged(
                manifest.RANKS,
                f"it has a line of {len(line)} bytes; expected at most {manifest.MAX_RANK_BYTES}",
            )
    return lines


def _opened(found: Manifest, files: StepFiles) -> OpenCheckpoint:
    """Return the open step, after checking that the files fit together."""
    trees, ranks = _json(files, found, manifest.STATE), _ranks(files, found)
    begins, specs = {}, {}
    for part in found.parts_with_tensors:
        name = part + manifest.TENSORS_SUFFIX
        begins[part], specs[part] = tensors.read_header(
            _chunked(files, found, name).read, found.files[name].size, name
        )
    outline = Outline(found, trees, specs, begins, _rank_parts(found, ranks))
    outline = replace(outline, specs=_check(manifest.STATE, lambda: _checked_specs(outline)))
    return OpenCheckpoint(outline, files, ranks)


def _check(name: str, check: Callable[[], Result]) -> Result:
    try:
        return check()
    except (ValueError, OverflowError) as error:
        raise Damaged(name, f"its content is not valid ({error})") from error


def _rank_parts(found: Manifest, ranks: Sequence[bytes]) -> frozenset[str]:
    """Return the names of the parts that have their own state on each rank."""
    if len(ranks) != found.world_size:
        raise Damaged(manifest.RANKS, f"it has {len(ranks)} ranks instead of {found.world_size}")
    names: set[str] = set()
    for rank in ranks:
        parts = rank_tree(rank)
        if not isinstance(parts, dict):
            raise Damaged(
                manifest.RANKS, "a line of it is not an object with an entry for each part"
            )
        names.update(parts)
    return frozenset(names)


def _checked_specs(outline: Outline) -> dict[str, dict[str, TensorSpec]]:
    """Return the dtypes and shapes of the tensors, in the order of the files.

    A file may store a tensor as another dtype; see `dtypes.PAIRS`.

    Raises:
        ValueError: the trees are not valid, or do not fit the files.
    """
    checked: dict[str, dict[str, TensorSpec]] = {}
    if not isinstance(outline.trees, dict):
        raise ValueError("expected an object with an entry for each part")
    for part in outline.specs:
        if part not in outline.trees:
            raise ValueError(f"it has no entry for part {part}, which has tensors")
    for part, encoded in outline.trees.items():
        manifest.check_part_name(part)
        again, used = tree.encode(outline.tree(part), part)
        stored = outline.specs.get(part, {})
        if used.keys() != stored.keys() or again != encoded:
            raise ValueError(f"the tensor names of {part} differ from those in its file")
        if stored:
            checked[part] = {name: tree.spec_of(used[name]) for name in stored}
    return checked
