"""Values of all kinds in a checkpoint of a job of one rank."""

import random

import numpy as np
import pytest


def saved_and_restored(hvd, folder, make, fill, **options):
    """Save what `fill(make())` gives, and restore it into what `make()` gives.

    Args:
        hvd: `hvdkit.torch`.
        folder: of the checkpoints.
        make: returns a module.
        fill: changes the module that is saved.
        options: of the checkpointer that restores.
    """
    saved, restored = make(), make()
    fill(saved)
    with hvd.Checkpointer(folder, model=saved, metadata=options.pop("saved", None)) as checkpointer:
        checkpointer.save(1)
    with hvd.Checkpointer(folder, model=restored, **options) as checkpointer:
        checkpointer.restore()
    return saved, restored


ARRAYS = {
    "floats": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    "masks": [np.array([[True, False]]), np.array(True)],
    "none": np.zeros((0, 3), np.int16),
    "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(20, dtype=np.uint8)[::3],
    "complex": (np.array([1 + 2j, 3j]), np.array([1j], np.complex64)),
    "large": np.arange(300_000, dtype=np.int64),
}


def same(one, other):
    if isinstance(one, np.ndarray):
        assert type(other) is np.ndarray
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert type(one) is type(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


def test_arrays_in_metadata(hvd, tmp_path):
    import torch

    generator = np.random.Generator(np.random.MT19937(3))
    generator.random(5)
    values = {**ARRAYS, "generator": generator.bit_generator.state}
    metadata = {"old": 1}
    model = torch.nn.Linear(2, 2)
    saved_and_restored(
        hvd, tmp_path, lambda: model, lambda _: None, saved=values, metadata=metadata
    )
    same(values, metadata)
    metadata["floats"][:] = 0  # the restored arrays are the user's own
    again = np.random.Generator(np.random.MT19937())
    again.bit_generator.state = metadata["generator"]
    assert again.random() == generator.random()


def test_arrays_and_tensors_in_extra_state(hvd, tmp_path):
    import torch

    class Odd(torch.nn.Linear):
        extra = None

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    def fill(model):
        model[0].extra = {"arrays": ARRAYS, "tensors": [torch.arange(3), (torch.ones(2, 2),)]}

    _, restored = saved_and_restored(hvd, tmp_path, lambda: torch.nn.Sequential(Odd(2, 2)), fill)
    same(ARRAYS, restored[0].extra["arrays"])
    first, (second,) = restored[0].extra["tensors"]
    assert torch.equal(first, torch.arange(3))
    assert torch.equal(second, torch.ones(2, 2))


def test_arrays_in_the_state_of_schedulers_scalers_and_optimizers(hvd, tmp_path):
    import torch

    class Stateful:
        def __init__(self, value=None):
            self.value = value

        def state_dict(self):
            return {"value": self.value, "tensor": torch.ones(2)}

        def load_state_dict(self, state):
            self.value = state["value"]

    def checkpointer(value):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.state["history"] = value
        scheduler, scaler = Stateful(value), Stateful(value)
        return (
            hvd.Checkpointer(
                tmp_path, model=model, optimizer=optimizer, lr_scheduler=scheduler, scaler=scaler
            ),
            lambda: [optimizer.state["history"], scheduler.value, scaler.value],
        )

    with checkpointer(ARRAYS)[0] as saving:
        saving.save(1)
    restoring, values = checkpointer(None)
    with restoring:
        restoring.restore()
    same([ARRAYS] * 3, values())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("torch.ones(2)", r"metadata\['x'\] is a torch.Tensor.* x.numpy\(\)"),
        ("np.random.default_rng()", r"generators=\{.*or its bit_generator.state"),
        ("np.array(['a'])", r"the array metadata\['x'\] is of <U1: expected one of bool"),
        ("np.array([None])", r"is of object"),
        ("np.zeros(1, np.longdouble)", r"is of (float128|longdouble)"),
        ("np.ma.zeros(2)", r"is a numpy.ma.*MaskedArray"),
    ],
)
def test_what_metadata_cannot_hold_is_named(hvd, tmp_path, value, said):
    import torch

    from hvdkit.errors import UsageError

    metadata = {"x": eval(value, {"torch": torch, "np": np})}
    with (
        hvd.Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), metadata=metadata) as checkpointer,
        pytest.raises(UsageError, match=said),
    ):
        checkpointer.save(1)


GENERATORS = {
    "python": lambda seed: random.Random(seed),
    "pcg64": lambda seed: np.random.default_rng(seed),
    **{
        name: lambda seed, name=name: np.random.Generator(getattr(np.random, name)(seed))
        for name in ("MT19937", "Philox", "SFC64", "PCG64DXSM")
    },
}


def draws(generators):
    return [
        [generator.random(), generator.integers(9) if hasattr(generator, "integers") else None]
        for generator in generators.values()
    ]


def test_generators_of_numpy_and_python(hvd, tmp_path):
    import torch

    def checkpointer(seed):
        own = {name: make(seed) for name, make in GENERATORS.items()}
        draws(own)
        of_torch = torch.Generator().manual_seed(seed)
        made = hvd.Checkpointer(
            tmp_path, model=torch.nn.Linear(1, 1), generators={**own, "torch": of_torch}
        )
        return made, lambda: [draws(own), torch.rand(1, generator=of_torch).item()]

    saving, expected = checkpointer(1)
    with saving:
        saving.save(1)
    restoring, found = checkpointer(2)
    with restoring:
        restoring.restore()
    assert found() == expected()


def test_a_generator_of_another_kind_under_the_same_name(hvd, tmp_path):
    import torch

    from hvdkit.errors import HvdkitError

    def checkpointer(kind):
        generators = {"noise": GENERATORS[kind](1)}
        return hvd.Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), generators=generators)

    with checkpointer("python") as saving:
        saving.save(1)
    with (
        pytest.raises(HvdkitError, match=r"generators\['noise'\] .*random.Random.* MT19937"),
        checkpointer("MT19937") as restoring,
    ):
        restoring.restore()


@pytest.mark.parametrize("wrong", ["3", "random.SystemRandom()", "np.random.PCG64(1)"])
def test_what_is_no_generator(hvd, tmp_path, wrong):
    import torch

    from hvdkit.errors import UsageError

    with pytest.raises(UsageError, match=r"generators\['x'\] is a .*expected a torch.Generator,"):
        hvd.Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), generators={"x": eval(wrong)})


def test_a_reader_that_does_not_know_arrays_says_so(hvd, tmp_path):
    import torch

    from hvdkit.checkpoint import manifest
    from hvdkit.checkpoint.errors import CheckpointError
    from hvdkit.checkpoint.store import Store

    metadata = {}
    with hvd.Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), metadata=metadata) as checkpointer:
        checkpointer.save(1)
        metadata["x"] = np.arange(3)
        checkpointer.save(2)
    assert [info.manifest.version for info in Store(tmp_path).steps()] == [1, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "_VERSIONS", (1,))
        with pytest.raises(CheckpointError, match="is of version 2; .* Update hvdkit"):
            Store(tmp_path).newest_good()
        assert not Store(tmp_path).quarantined()


class Block:
    """Makes models with a submodule that is compiled, or not."""

    @staticmethod
    def model(compiled):
        import torch

        class Normed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(4, 4)
                self.norm = torch.nn.BatchNorm1d(4)

            def get_extra_state(self):
                return {"seen": int(self.norm.running_mean[0])}

            def set_extra_state(self, state):
                self.seen = state["seen"]

        block = Normed()
        if compiled == "in place":
            block.compile()
        elif compiled == "nested":
            block.linear = torch.compile(block.linear)
        if compiled in ("block", "nested", "all"):
            block = torch.compile(block)
        made = torch.nn.Module()
        made.block, made.head = block, torch.nn.Linear(4, 4)
        made.head.weight = block.linear.weight
        return torch.compile(made) if compiled == "all" else made


COMPILED = ["no", "in place", "block", "nested", "all"]


@pytest.mark.parametrize("here", COMPILED)
@pytest.mark.parametrize("there", COMPILED)
def test_compiled_submodules(hvd, tmp_path, there, here):
    import torch

    saved, restored = Block.model(there), Block.model(here)
    block = saved.block
    with torch.no_grad():
        block.norm.running_mean += 3
        block.norm.running_var *= 2
    with hvd.Checkpointer(tmp_path, model=saved) as checkpointer:
        checkpointer.save(1)
    (step,) = checkpointer._store.steps()
    names = [*safetensors_names(f"{step.location}/model.safetensors")]
    assert not [name for name in names if "_orig_mod" in name]
    assert "block.linear.weight" in names
    with hvd.Checkpointer(tmp_path, model=restored) as checkpointer:
        checkpointer.restore()
    one, other = (list(each.state_dict().items()) for each in (saved, restored))
    for (name, tensor), (_, again) in zip(one, other, strict=True):
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, again), name
    assert restored.block.seen == 3
    assert restored.head.weight is restored.block.linear.weight


def safetensors_names(file):
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        return list(opened.keys())


@pytest.mark.parametrize("here", COMPILED)
@pytest.mark.parametrize("strict", [True, False])
def test_names_with_a_prefix_from_an_earlier_version(hvd, tmp_path, here, strict):
    """Names had the prefix of `torch.compile` in their middle."""
    import torch

    from hvdkit.torch import parts

    saved, restored = Block.model("block"), Block.model(here)
    with torch.no_grad():
        saved.block.norm.running_mean += 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_without_prefixes", lambda _: str)
        with hvd.Checkpointer(tmp_path, model=saved) as checkpointer:
            checkpointer.save(1)
    (step,) = checkpointer._store.steps()
    names = safetensors_names(f"{step.location}/model.safetensors")
    assert "block._orig_mod.linear.weight" in names
    with hvd.Checkpointer(tmp_path, model=restored) as checkpointer:
        checkpointer.restore(strict=strict)
    assert torch.equal(restored.head.weight, saved.head.weight)
    assert restored.block.norm.running_mean.tolist() == [3] * 4
    assert restored.block.seen == 3
