"""`restore(strict=False)` and `restore(only=...)`."""

import numpy as np
import pytest

from hvdkit.checkpoint.items import Plain, Variables
from hvdkit.checkpoint.state import Discarded
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from tests.simulated.ranks import simulated
from tests.unit.checkpoint.simulated_state import Arrays, ArrayTensor, Own
from tests.unit.checkpoint.test_manager import SIZE, make, on_ranks, same, saved, state


def variables(**arrays):
    """Return an item of these variables, and the arrays."""
    return Variables(lambda: arrays, "model", ArrayTensor), arrays


def filled(value, *shape):
    return np.full(shape, value, np.float32)


def test_items_that_were_added_later_stay_as_they_are(tmp_path, caplog):
    """The checkpoint lacks the scaler of this job, or this job lacks that of the checkpoint."""

    def run(collectives):
        scale = {"old": 1.0}
        with make(collectives, tmp_path, state(1), {"old": Plain(dict, print)}) as saving:
            saving.save(1)
        new = Plain(lambda: dict(scale), scale.update)
        with make(collectives, tmp_path, part := state(5), {"scaler": new}) as restoring:
            with pytest.raises(UsageError, match="has no scaler; .*or restore with strict=False"):
                restoring.restore()
            assert same(part, 5)
            assert restoring.restore(strict=False).step == 1
        assert same(part, 1)
        assert scale == {"old": 1.0}

    on_ranks(run)
    assert "step 1 has no scaler; not restored" in caplog.text


def test_a_model_with_another_last_layer(tmp_path, caplog):
    def run(collectives):
        part, _ = variables(body=filled(1, 4, 3), head=filled(1, 3, 10), old=filled(1, 2))
        with make(collectives, tmp_path, part) as saving:
            saving.save(1)
        part, arrays = variables(body=filled(7, 4, 3), head=filled(7, 3, 5), new=filled(7, 2))
        with make(collectives, tmp_path, part) as restoring:
            with pytest.raises(UsageError, match="the checkpoint does not fit model"):
                restoring.restore()
            restoring.restore(strict=False)
        assert (arrays["body"] == 1).all()
        assert (arrays["head"] == 7).all()
        assert (arrays["new"] == 7).all()

    on_ranks(run)
    (said,) = [r.getMessage() for r in caplog.records if "restored in part" in r.getMessage()]
    for line in (
        "head (head F32[3, 5]) is not in the checkpoint",
        "new (new F32[2]) is not in the checkpoint",
        "old (old F32[2]) is only in the checkpoint",
    ):
        assert line in said


def test_an_item_that_does_not_fit_stays_as_it_is(tmp_path, caplog):
    def run(collectives):
        saved(collectives, tmp_path, 1)
        other = Arrays(3, another=filled(3, 2))
        with make(collectives, tmp_path, other, {"new": Plain(dict, print)}) as restoring:
            restoring.restore(strict=False)
        assert other.value == 3
        assert other.adopted == 0

    on_ranks(run)
    assert "model: the checkpoint has" in caplog.text


@simulated(SIZE)
def test_only_some_parts(collectives, tmp_path):
    optimizer, own = state(1), Own("saved")
    with make(collectives, tmp_path, state(1), {"optimizer": optimizer}, own) as saving:
        saving.save(1)
    model, optimizer, own = state(2), state(2), Own("mine")
    with make(collectives, tmp_path, model, {"optimizer": optimizer}, own) as restoring:
        with pytest.raises(UsageError, match=r"only is \('weights',\): expected some of model"):
            restoring.restore(only=("weights",))
        with pytest.raises(UsageError, match="only is 'model': expected some of"):
            restoring.restore(only="model")
        assert same(model, 2)
        restoring.restore(only=("model",))
        assert (same(model, 1), same(optimizer, 2), own.value) == (True, True, "mine")
        restoring.restore(only=["optimizer", "own"])
        assert (same(optimizer, 1), own.value) == (True, "saved")
        # The next save begins a new run.
        restoring.save(1)
        restoring.wait()
        if collectives.rank == 0:
            assert [info.manifest.run for info in Store(tmp_path).steps()] == [1, 2]


@simulated(SIZE)
def test_a_model_of_which_other_layers_fit_on_one_rank_is_an_error(collectives, tmp_path):
    part, _ = variables(body=filled(1, 4), head=filled(1, 3))
    with make(collectives, tmp_path, part) as saving:
        saving.save(1)
    size = 3 if collectives.rank == 1 else 5
    part, arrays = variables(body=filled(7, 4), head=filled(7, size))
    with (
        make(collectives, tmp_path, part) as restoring,
        pytest.raises(UsageError, match="ranks disagree about which parts of the"),
    ):
        restoring.restore(strict=False)
    assert (arrays["body"] == 7).all()


def test_a_discarded_tensor_keeps_its_size():
    part, arrays = variables(a=filled(1, 2))
    prepared, lines = part.plan_partial_restore({"a": ArrayTensor(filled(0, 2)).spec})
    assert (prepared["a"].array is arrays["a"], lines) == (True, [])
    spec = ArrayTensor(filled(0, 3)).spec
    prepared, _ = part.plan_partial_restore({"a": spec})
    assert isinstance(prepared["a"], Discarded)
    assert prepared["a"].spec == spec


def test_layers_of_one_class_are_matched_in_order():
    """Keras numbers the layers of a class through all models of a process."""
    saved = {f"dense_{n}/kernel": ArrayTensor(filled(n, 2)).spec for n in (1, 2)}
    part, arrays = variables(**{f"dense_{n}/kernel": filled(0, 2) for n in (7, 8)})
    prepared, lines = part.plan_partial_restore(saved)
    assert [each.array for each in prepared.values()] == list(arrays.values())
    assert lines == []
    # One layer is missing. Only its name tells which one.
    part, arrays = variables(**{"dense_2/kernel": filled(0, 2)})
    prepared, lines = part.plan_partial_restore(saved)
    assert isinstance(prepared["dense_1/kernel"], Discarded)
    assert prepared["dense_2/kernel"].array is arrays["dense_2/kernel"]
    assert lines == ["dense_1/kernel (dense/kernel F32[2]) is only in the checkpoint"]


def test_layers_of_equal_names_are_not_matched_in_order():
    """The user named the layers, and has exchanged them since."""
    saved = {f"head_{n}/kernel": ArrayTensor(filled(n, 2)).spec for n in (1, 2)}
    part, arrays = variables(**{f"head_{n}/kernel": filled(0, 2) for n in (2, 1)})
    with pytest.raises(UsageError, match=r"head_1/kernel F32\[2\] -> head_2/kernel F32\[2\]"):
        part.plan_restore(saved)
    prepared, lines = part.plan_partial_restore(saved)
    assert all(prepared[name].array is array for name, array in arrays.items())
    assert lines == []
