"""The messages of `hvdkit run`, for all tests of the launcher."""

import pytest

from hvdkit.launch.control import readers
from tests.unit.launch.commands import SAID


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """The list of the messages in this process, which are also printed."""
    say = readers.say
    SAID.clear()
    monkeypatch.setattr(readers, "say", lambda text: (SAID.append(text), say(text)))
    return SAID
