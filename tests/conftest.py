"""Hooks and fixtures of all tests: fail a test that leaks, and skip slow tests without --long."""

import contextlib
import os
import signal
import threading
import time

import psutil
import pytest

from tests.ranks import fork_server

_GRACE_SECONDS = 5.0
# Environment variables of processes that live for the whole session: ranks of a pool, servers.
_KEPT_MARKS = {"HVDKIT_RANK_GROUP", "HVDKIT_TEST_SERVER"}
# Prefixes of threads that live for the whole session: the rendezvous server's, and fsspec's.
_KEPT_THREADS = ("hvdkit-rend", "fsspecIO", "asyncio_")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the slow forms too")


def pytest_configure():
    # A background job of a shell ignores Ctrl-C, and one of nohup ignores SIGHUP. So would the
    # processes that tests start, including those that test these signals.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="slow form: scripts/test --long")
        for item in items:
            if item.get_closest_marker("long") or _is_long_with_its_parameter(item):
                item.add_marker(skip)


def _is_long_with_its_parameter(item):
    marker = item.get_closest_marker("long_with")
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    # The parameter `rank_pool` is a job, with a framework.
    frameworks = [each.framework for each in parameters if hasattr(each, "framework")]
    return marker is not None and any(value in marker.args for value in [*parameters, *frameworks])


def _new_children(before):
    """Return the descendants of this process that are not among the process IDs `before`.

    Those that live for the whole session are left out. `psutil.Process.children` would read the
    parent of each process of the machine, which takes longer than most tests.
    """
    children = set()
    for pid in set(psutil.pids()) - before:
        with contextlib.suppress(psutil.Error):  # the process has ended meanwhile
            child = psutil.Process(pid)
            if (
                any(parent.pid == os.getpid() for parent in child.parents())
                and child.status() != psutil.STATUS_ZOMBIE
                and not _lives_for_the_session(child)
            ):
                children.add(child)
    return children


def _lives_for_the_session(child):
    environment = child.environ()
    # The forks of a fork server have its environment.
    is_fork_server = fork_server.MARK in environment and child.ppid() == os.getpid()
    return is_fork_server or bool(_KEPT_MARKS & environment.keys())


def _threads():
    return {t for t in threading.enumerate() if not t.name.startswith(_KEPT_THREADS)}


def _left(look):
    """Return what `look` finds after a grace period."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that changes the environment, or leaves a thread or a process running."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    threads, pids, folder = _threads(), set(psutil.pids()), os.getcwd()
    yield
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    changed = {k for k in environment.keys() | after.keys() if environment.get(k) != after.get(k)}
    assert not changed, f"environment variables changed: {sorted(changed)}"
    assert os.getcwd() == folder, "the working directory was changed"
    assert not _left(lambda: _threads() - threads), "threads were left running"
    assert not _left(lambda: _new_children(pids)), "processes were left running"


@pytest.fixture(scope="session", autouse=True)
def no_ranks_are_left():
    """Fail a session that leaves a rank of a pool running."""
    yield
    fork_server.stop_servers()
    left = _left(lambda: psutil.Process().children(recursive=True))
    assert not left, f"processes were left running: {left}"
