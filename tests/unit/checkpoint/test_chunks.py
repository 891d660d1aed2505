"""Files are read as they were written, and a changed bit is found in the chunk that has it."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.checkpoint import chunks
from hvdkit.checkpoint.chunks import ChunkedFile, ChunkHasher, FileRecord
from hvdkit.checkpoint.errors import Damaged

CHUNK = 16


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", CHUNK)
        patch.setattr(chunks, "CACHED_BYTES", 5)
        yield


def record_of(content, version):
    if version == 1:
        return FileRecord(len(content), (xxhash.xxh3_128_hexdigest(content),), max(len(content), 1))
    hasher = ChunkHasher()
    view = memoryview(content)
    # The ends of these pieces are not those of chunks.
    for at in range(0, len(view), 7):
        hasher.update(view[at : at + 7])
    return hasher.record()


def opened(content, record, readers):
    def read_into(out, offset):
        out[:] = np.frombuffer(content, np.uint8)[offset : offset + out.size]

    return ChunkedFile("model.safetensors", record, read_into, readers)


def pieces_until_error(file, error):
    """Return the pieces of a file that are read before the expected error."""
    pieces, reader = [], file.pieces()

    def read_on():
        for _, piece in reader:
            pieces.append(piece.tobytes())

    with pytest.raises(error):
        read_on()
    return pieces


files = st.binary(max_size=5 * CHUNK + 3)


@settings(deadline=None)
@given(files, st.sampled_from([1, 2]), st.integers(0, 3), st.data())
def test_every_range_is_what_was_written(content, version, readers, data):
    file = opened(content, record_of(content, version), readers)
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, len(content)))
    out = np.empty(end - begin, np.uint8)
    file.read(out, begin)
    assert out.tobytes() == content[begin:end]
    counted = []
    file.verify(counted.append)
    assert sum(counted) == len(content)
    pieces = [(at, piece.tobytes()) for at, piece in file.pieces()]
    assert b"".join(piece for _, piece in pieces) == content
    assert all(content[at : at + len(piece)] == piece for at, piece in pieces)
    assert max((len(piece) for _, piece in pieces), default=0) <= CHUNK


@settings(deadline=None)
@given(files.filter(len), st.sampled_from([1, 2]), st.integers(0, 3), st.data())
def test_a_changed_bit_is_found_before_its_chunk_is_given_out(content, version, readers, data):
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    file = opened(bytes(changed), record_of(content, version), readers)
    with pytest.raises(Damaged, match="its content is not what was written: the hash of bytes"):
        file.verify()
    pieces = pieces_until_error(file, Damaged)
    assert sum(map(len, pieces)) < len(content)
    if version == 2:
        first = place // CHUNK * CHUNK
        assert b"".join(pieces) == content[:first]
        out = np.empty(first, np.uint8)
        file.read(out, 0)
        assert out.tobytes() == content[:first]
        with pytest.raises(Damaged, match=f"bytes {first} to {min(first + CHUNK, len(content))}"):
            file.read(np.empty(1, np.uint8), place)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_an_error_of_reading_ahead_is_raised_in_its_place(readers):
    content = bytes(range(4 * CHUNK))

    def read_into(out, offset):
        if offset >= 2 * CHUNK:
            raise OSError("gone")
        out[:] = np.frombuffer(content, np.uint8)[offset : offset + out.size]

    file = ChunkedFile("model.safetensors", record_of(content, 2), read_into, readers)
    assert b"".join(pieces_until_error(file, OSError)) == content[: 2 * CHUNK]
