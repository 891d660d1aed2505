"""The modules that a rank reports for a spare."""

import sys
from unittest.mock import MagicMock

import pytest

from hvdkit.runtime.loaded_modules import ImportGroups


@pytest.mark.parametrize("module", [None, MagicMock(), object()], ids=["None", "mock", "object"])
def test_entries_of_sys_modules_that_are_no_modules(
    monkeypatch: pytest.MonkeyPatch, module: object
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    imports = ImportGroups()
    imports.note({})
    assert not any("tensorflow" in group["modules"] for group in imports.groups)
