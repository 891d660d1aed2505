"""Files that are written as a whole."""

import pytest

from hvdkit.whole_files import replacing


def test_an_error_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "start.json"
    with replacing(path) as draft:
        draft.write_text("old")
        assert not path.exists()

    def full(draft):
        draft.write_text("new, but only a par")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"), replacing(path) as draft:
        full(draft)
    assert path.read_text() == "old"
    # The draft could not be made.
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["start.json"]
