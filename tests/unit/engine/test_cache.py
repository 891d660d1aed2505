import grp
import os
import pwd
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from hvdkit.engine import cache
from hvdkit.errors import HvdkitError
from hvdkit.system import trusted_paths


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    path.write_bytes(b"first")
    return path


def test_a_stored_wheel_is_found(wheel):
    assert cache.lookup("k") is None
    kept = cache.store("k", wheel, {"a": 1})
    assert cache.lookup("k") == kept
    assert kept.read_bytes() == b"first"
    assert cache.lookup("other") is None


def test_storing_again_replaces(wheel):
    cache.store("k", wheel, {})
    wheel.write_bytes(b"second")
    assert cache.store("k", wheel, {}).read_bytes() == b"second"
    assert [entry.name for entry in (cache.folder() / "wheels").iterdir()] == ["k"]


def test_another_process_stores_the_same_key_at_the_same_time(wheel, monkeypatch):
    cache.store("k", wheel, {})
    other = cache.store("other", wheel, {}).parent
    rename = Path.rename

    def racing(path, target):
        if target.name == "k" and other.exists():
            rename(other, target)
        return rename(path, target)

    wheel.write_bytes(b"second")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", racing)
        assert cache.store("k", wheel, {}).read_bytes() == b"second"
    assert [entry.name for entry in (cache.folder() / "wheels").iterdir()] == ["k"]


@pytest.mark.parametrize("damage", ["truncate", "entry", "gone"])
def test_a_damaged_entry_is_ignored(wheel, damage):
    kept = cache.store("k", wheel, {})
    if damage == "truncate":
        kept.write_bytes(b"fir")
    elif damage == "entry":
        (kept.parent / "entry.json").write_text("{")
    else:
        kept.unlink()
    assert cache.lookup("k") is None
    assert cache.store("k", wheel, {}) == kept
    assert cache.lookup("k") == kept


def test_an_interrupted_store_leaves_the_cache_as_it_was(wheel, monkeypatch):
    cache.store("k", wheel, {})
    wheel.write_bytes(b"second")

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "sha256", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.store("k", wheel, {})
    monkeypatch.undo()
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(wheel.parent / "cache"))
    assert cache.lookup("k").read_bytes() == b"first"
    assert [entry.name for entry in (cache.folder() / "wheels").iterdir()] == ["k"]


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(HvdkitError, match=r"cannot be created \(.*\). Set HVDKIT_CACHE_DIR"):
        cache.make(cache.folder() / "wheels")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
#: "nobody", a user without files.
OTHER = 65534
# Imported before the change of user, because the other user may not be able to read these files.
_IMPORTS = "import os; from pathlib import Path; from hvdkit.engine import cache"


def as_other(code, home, cache):
    """Run `code` as another user; return its output and its warnings."""
    done = subprocess.run(
        [sys.executable, "-c", f"{_IMPORTS}; os.setgid({OTHER}); os.setuid({OTHER}); {code}"],
        env=os.environ | {"HOME": str(home), "HVDKIT_CACHE_DIR": str(cache), "XDG_CACHE_HOME": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.fixture
def shared(tmp_path_factory):
    """A folder that other users can enter, with the home of another user."""
    for parent in (tmp_path_factory.getbasetemp(), *tmp_path_factory.getbasetemp().parents[:1]):
        parent.chmod(0o755)
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o755)
    home = folder / "home"
    home.mkdir()
    os.chown(home, OTHER, OTHER)
    return folder


@needs_root
def test_a_second_user_of_a_shared_cache(shared, monkeypatch):
    """The second user finds the entries of root, and stores new ones in a cache of their own."""
    cache_folder = shared / "cache"
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(cache_folder))
    wheel = shared / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"first")
    kept = cache.store("k", wheel, {})
    code = (
        "print(cache.lookup('k'), cache.lookup('new'),"
        f"cache.store('new', Path({str(wheel)!r}), {{}}), cache.lookup('new') is not None)"
    )
    out, said = as_other(code, shared / "home", cache_folder)
    own = shared / "home" / ".cache" / "hvdkit" / "wheels" / "new" / wheel.name
    assert out == f"{kept} None {own} True"
    assert said == ""


@needs_root
@pytest.mark.parametrize("planted", ["file", "folder", "open folder", "list"])
def test_an_entry_that_another_user_could_have_replaced_is_not_used(
    wheel, caplog, monkeypatch, planted
):
    kept = cache.store("k", wheel, {})
    if planted == "open folder":
        kept.parent.parent.chmod(0o777)
    elif planted == "list":
        monkeypatch.setattr(trusted_paths, "_is_private", lambda group: True)
        give_access(kept.parent.parent)
    else:
        os.chown(kept if planted == "file" else kept.parent, OTHER, OTHER)
    assert cache.lookup("k") is None
    (said,) = caplog.messages
    assert "is not used, because" in said
    assert str(kept if planted == "file" else kept.parent.parent) in said


def give_access(folder):
    """Let the other user write, by an access control list. The mode then has the bits of a group.

    The list has entries of tag, permissions and user: of the owner, the other user, the owner's
    group, the mask and all others (`acl(5)`).
    """
    nobody = 0xFFFFFFFF
    entries = [(1, 7, nobody), (2, 7, OTHER), (4, 5, nobody), (16, 7, nobody), (32, 5, nobody)]
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_access", content)
    except OSError:
        pytest.skip("this file system has no access control lists")
    assert folder.stat().st_mode & 0o20


@needs_root
@pytest.mark.parametrize("changed", ["owner", "mode", "link"])
def test_nothing_is_written_to_a_cache_that_another_user_may_change(shared, wheel, changed):
    folder = cache.folder()
    if changed == "link":
        folder.symlink_to(cache.make(shared / "own"))
        os.chown(folder, OTHER, OTHER, follow_symlinks=False)
    else:
        cache.make(folder / "wheels")
        if changed == "owner":
            os.chown(folder, OTHER, OTHER)
        else:
            folder.chmod(0o777)
    before = sorted(folder.rglob("*"))
    with pytest.raises(
        HvdkitError, match=r"is not used, because .*\. Set HVDKIT_CACHE_DIR to a"
    ) as e:
        cache.store("k", wheel, {})
    assert str(folder) in str(e.value)
    assert "all users may write" in str(e.value) or "belongs to user" in str(e.value)
    assert sorted(folder.rglob("*")) == before


@needs_root
def test_a_group_whose_members_are_not_known(shared, monkeypatch):
    """A directory server may not list the users who have a group as their own."""
    group = next(each for each in grp.getgrall() if each.gr_gid and not each.gr_mem)
    monkeypatch.setattr(pwd, "getpwall", list)
    folder = shared / "of a group"
    folder.mkdir()
    os.chown(folder, 0, group.gr_gid)
    folder.chmod(0o775)
    subprocess.run(["touch", folder / "x"], user=OTHER, extra_groups=[group.gr_gid], check=True)
    assert trusted_paths.untrusted(folder) == f"its group may write to {folder}"


@needs_root
def test_a_link_of_another_user_between_own_links_is_noticed(tmp_path):
    """The other user could let it lead to other files after the check."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o1777)
    own.mkdir()
    (shared / "theirs").symlink_to("../own")
    (tmp_path / "mine").symlink_to("shared/theirs")
    assert trusted_paths.untrusted(tmp_path / "mine") == ""
    os.chown(shared / "theirs", OTHER, OTHER, follow_symlinks=False)
    reason = trusted_paths.untrusted(tmp_path / "mine" / ".." / "own")
    assert f"{shared}/theirs belongs to user" in reason


def test_a_group_of_the_umask_cannot_write(wheel):
    before = os.umask(0o002)
    try:
        kept = cache.store("k", wheel, {})
    finally:
        os.umask(before)
    made = (kept, kept.with_name("entry.json"), *kept.parents[:3])
    assert [oct(path.stat().st_mode & 0o022) for path in made] == ["0o0"] * 5


def test_the_copy_of_a_wheel_is_checked(wheel, tmp_path, monkeypatch):
    cache.store("k", wheel, {})
    copy = shutil.copy

    def replaced(source, into):
        Path(source).write_bytes(b"of another user")
        return copy(source, into)

    into = tmp_path / "into"
    into.mkdir()
    assert cache.lookup("k", into) == into / wheel.name
    monkeypatch.setattr(shutil, "copy", replaced)
    assert cache.lookup("k", into) is None


def test_a_private_group_may_write(wheel, monkeypatch):
    kept = cache.store("k", wheel, {})
    kept.parent.chmod(0o775)
    monkeypatch.setattr(trusted_paths, "_is_private", lambda group: True)
    assert cache.lookup("k") == kept
    monkeypatch.setattr(trusted_paths, "_is_private", lambda group: False)
    assert cache.lookup("k") is None


def test_the_default_folder_is_the_users(monkeypatch):
    monkeypatch.delenv("HVDKIT_CACHE_DIR", raising=False)
    assert cache.folder() == platformdirs.user_cache_path("hvdkit")
