"""The parts of an optimizer's state that are compared between ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hvdkit.agreement.differences import Replicas
from hvdkit.torch.replicas import torch_replicas


@pytest.fixture(autouse=True)
def inductor_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore the variable that PyTorch's optimizers set when they import torch._dynamo."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Key:
    """An object whose text contains its address."""


def replicas(state: dict[Any, Any], **options: Any) -> Replicas:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for key, value in options.items():
        optimizer.defaults[key] = optimizer.param_groups[0][key] = value
    optimizer.state[parameter] = state
    # PyTorch's type of `state` has tensors as keys only.
    common: Any = optimizer.state
    common[Key()] = {"mean": torch.ones(1)}
    common["count"] = 3
    return torch_replicas({"weight": parameter}, optimizer)


def names(state: dict[Any, Any]) -> list[str]:
    return [item.name for item in replicas(state).items]


def test_keys_that_differ_between_ranks_are_not_compared() -> None:
    key = Key()
    state = {"of": {key: torch.ones(1), id(key): torch.ones(1), 7: 1, "x": 2}}
    assert names(state) == [
        *("'weight'", "of[7] of 'weight'", "of['x'] of 'weight'", "count of the optimizer"),
    ]


def test_a_container_within_itself() -> None:
    state: dict[Any, Any] = {"list": [{"n": 1}]}
    state["itself"] = state
    state["list"][0]["outer"] = state["list"]
    assert names(state) == [
        *("'weight'", "list[0]['n'] of 'weight'", "count of the optimizer"),
    ]


@pytest.mark.parametrize("rank", range(2))
def test_each_rank_may_have_a_device_as_option(rank: int) -> None:
    settings = replicas({}, device=f"cuda:{rank}", mode="exact").options
    assert "mode of parameter group 0 is 'exact'" in settings
    assert not any("cuda" in line for line in settings)
