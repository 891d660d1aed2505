"""`--host-discovery-script`."""

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.hosts.discovery import DiscoveryStopped, discover
from hvdkit.launch.hosts.hosts import Host


def script(tmp_path, text):
    path = tmp_path / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo host0:2; echo host1", [Host("host0", 2), Host("host1", 1)]),
        # A script that names no host yet, and one with a program in the background.
        ("echo", []),
        ("echo host0:2; sleep 60 &", [Host("host0", 2)]),
    ],
)
def test_a_script_names_the_hosts(tmp_path, text, expected):
    assert discover(script(tmp_path, text)) == expected


def test_a_command_line_of_the_shell(tmp_path):
    path = script(tmp_path, 'echo host0:"$1"')
    assert discover(Path(f"{path} $((1 + 1))")) == [Host("host0", 2)]
    with pytest.raises(UsageError, match="failed with exit status 127: .*not found"):
        discover(Path(f"{tmp_path}/other.sh 2"))
    with pytest.raises(UsageError, match="No such file"):
        discover(tmp_path / "missing")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exit 3", "failed with exit status 3: it wrote no error. Run it by hand"),
        ("echo no token >&2; exit 3", "failed with exit status 3: no token$"),
        ("echo ':'", "not a"),
        ("echo a:1; echo a:1", "a is named twice"),
        ("echo; echo pods not found", ", line 2: 'pods not found' is not a host; expected HOST"),
        ("echo a:1 b:1", ", line 1: 'a:1 b:1' is not a host"),
        ("echo a,b", ", line 1: 'a,b' is not a host"),
        (r"printf 'a\377:1'", r"'a\\\\xff:1' is not a host"),
        ("yes host0", "printed more than 10,000,000 bytes: expected a line HOST:SLOTS"),
    ],
)
def test_a_script_that_names_none(tmp_path, text, expected):
    path = script(tmp_path, text)
    with pytest.raises(UsageError, match=expected) as raised:
        discover(path)
    assert str(raised.value).startswith(f"--host-discovery-script {path}")


def test_hosts_without_slots(tmp_path):
    path = script(tmp_path, "echo a; echo user@b:2; echo [fe80::1]; echo [fe80::2]:3")
    slots = [(host.name, host.slots) for host in discover(path, slots=4)]
    assert slots == [("a", 4), ("user@b", 2), ("[fe80::1]", 4), ("[fe80::2]", 3)]


def test_a_script_that_this_user_may_not_end(tmp_path, monkeypatch):
    """For example, the script is started with sudo."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refuse)
    began = time.monotonic()
    with pytest.raises(DiscoveryStopped):
        discover(script(tmp_path, "exec sleep 4"), stopped=lambda: True)
    assert time.monotonic() < began + 3


def test_a_script_that_hangs_is_ended(tmp_path):
    began = time.monotonic()
    with pytest.raises(DiscoveryStopped):
        discover(script(tmp_path, "sleep 300"), stopped=lambda: time.monotonic() > began + 0.5)


def test_a_full_disk_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert discover(script(tmp_path, "echo host0")) == [Host("host0", 1)]


def test_a_script_that_prints_without_end_is_ended(tmp_path):
    for stream in ("1", "2"):
        with pytest.raises(UsageError, match="printed more than 10,000,000 bytes"):
            discover(script(tmp_path, f"cat /dev/zero >&{stream}"))
