"""Hooks and fixtures of all tests: fail a test that leaks, and skip slow tests without --long."""

import os
import signal
import threading
import time

import psutil
import pytest

_GRACE_SECONDS = 5.0
# Environment variables of processes that live for the whole session: ranks of a pool, servers.
_KEPT_MARKS = {"HVDKIT_RANK_GROUP", "HVDKIT_TEST_SERVER"}
# Prefixes of threads that live for the whole session: the rendezvous server's, and fsspec's.
_KEPT_THREADS = ("hvdkit-rend", "fsspecIO", "asyncio_")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the slow forms too")


def pytest_configure():
    # A background job of a shell ignores Ctrl-C, and so would the processes that tests start,
    # including those that test Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="slow form: scripts/test --long")
        for item in items:
            if "long" in item.keywords or _is_long_with_its_parameter(item):
                item.add_marker(skip)


def _is_long_with_its_parameter(item):
    marker = item.get_closest_marker("long_with")
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return marker is not None and any(value in marker.args for value in parameters)


def _unmarked_children():
    """Return the child processes, except those that live for the whole session."""
    children = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and not _KEPT_MARKS & child.environ().keys():
                children.add(child)
        except psutil.Error:
            continue  # the process has ended meanwhile
    return children


def _threads():
    return {t for t in threading.enumerate() if not t.name.startswith(_KEPT_THREADS)}


def _new(look, before):
    """Return the results of `look` that are not in `before`, after a grace period."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (new := look() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return new


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that changes the environment, or leaves a thread or a process running."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    threads, children, folder = _threads(), _unmarked_children(), os.getcwd()
    yield
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    changed = {k for k in environment.keys() | after.keys() if environment.get(k) != after.get(k)}
    assert not changed, f"environment variables changed: {sorted(changed)}"
    assert os.getcwd() == folder, "the working directory was changed"
    assert not _new(_threads, threads), "threads were left running"
    assert not _new(_unmarked_children, children), "processes were left running"


@pytest.fixture(scope="session", autouse=True)
def no_ranks_are_left():
    """Fail a session that leaves a rank of a pool running."""
    yield
    left = _new(lambda: set(psutil.Process().children(recursive=True)), set())
    assert not left, f"processes were left running: {left}"
