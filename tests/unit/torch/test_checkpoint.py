"""Values of all kinds in a checkpoint of a job of one rank."""

import base64
import inspect
import json
import logging.handlers
import queue
import random
import re
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.optim import lr_scheduler

from hvdkit.checkpoint import weights
from hvdkit.checkpoint.manifest import RANKS
from hvdkit.checkpoint.store import Store
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.torch.checkpoint import export
from hvdkit.torch.items import compiled
from hvdkit.torch.items.statistics import Statistics
from tests.ranks.torch.checkpoints import restore_once, save_once
from tests.unit.checkpoint.material import forge, step_folder

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


class Stateful:
    """A scheduler or scaler with a state of any kind."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "tensor": torch.ones(2)}

    def load_state_dict(self, state):
        self.value = state.get("value")


class WithExtraState(torch.nn.Linear):
    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_arrays_and_tensors_in_items_of_all_kinds(hvd, tmp_path):
    def checkpointer(value, metadata):
        model = torch.nn.Sequential(WithExtraState(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        tensors = [torch.arange(3), (torch.ones(2, 2),)]
        model[0].extra = value and {"arrays": value, "tensors": tensors}
        optimizer.state["history"] = value
        items = {"lr_scheduler": Stateful(value), "scaler": Stateful(value)}
        made = hvd.Checkpointer(
            tmp_path, model=model, optimizer=optimizer, metadata=metadata, **items
        )
        with pytest.raises(AttributeError):  # another dict would not be saved
            made.metadata = {"best": 1.0}
        return (
            made,
            model[0],
            lambda: [
                optimizer.state["history"],
                *(item.value for item in items.values()),
            ],
        )

    generator = np.random.Generator(np.random.MT19937(3))
    generator.random(5)
    saved = {**ARRAYS, "generator": generator.bit_generator.state}
    with checkpointer(ARRAYS, saved)[0] as saving:
        saving.save(1)
    metadata = {"floats": None, "new": 1}
    restoring, layer, values = checkpointer(None, metadata)
    with restoring:
        restoring.restore()
    # A name that the checkpoint does not have keeps its value.
    assert metadata.pop("new") == 1
    same(saved, metadata)
    same([ARRAYS] * 3, values())
    same(ARRAYS, layer.extra["arrays"])
    first, (second,) = layer.extra["tensors"]
    assert torch.equal(first, torch.arange(3))
    assert torch.equal(second, torch.ones(2, 2))
    metadata["floats"][:] = 0  # restored arrays are writable
    again = np.random.Generator(np.random.MT19937())
    again.bit_generator.state = metadata["generator"]
    assert again.random() == generator.random()


def test_an_object_whose_saved_state_is_empty(hvd, tmp_path):
    class Meter(Stateful):
        def state_dict(self):
            return super().state_dict() if self.value else {}

    meter = Meter()
    with hvd.Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), lr_scheduler=meter) as saving:
        saving.save(1)
        meter.value = 3
        saving.restore()
    assert meter.value is None


# As text, because the parameters of a test are sent to its ranks.
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("model=None", "model is None: expected a module"),
        ("model={}", "model is {}: expected a module"),
        ("metadata=[1]", "metadata is a list: expected a dict"),
        ("metadata={'x': torch.ones(2)}", r"metadata\['x'\] is a torch.Tensor.* x.numpy\(\)"),
        ("metadata={'x': np.array(['a'])}", r"the array metadata\['x'\] is of <U1"),
        ("generators=[random.Random()]", "generators is a list: expected a dict"),
        *(
            (
                f"generators={{'x': {wrong}}}",
                r"generators\['x'\] is a .*expected a torch.Generator,",
            )
            for wrong in ("3", "random.SystemRandom()", "np.random.PCG64(1)")
        ),
        ("keep_best='loss'", "keep_best has 'loss'; expected KeepBest"),
        ("keep_best=['loss']", "keep_best has 'loss'; expected KeepBest"),
        ("keep_last=1.5", "keep_last is 1.5; expected a whole number"),
        ("keep_every=True", "keep_every is True; expected a whole number"),
    ],
)
def test_wrong_arguments(hvd, tmp_path, wrong, words):
    def save():
        arguments = {"model": torch.nn.Linear(1, 1)} | eval(f"dict({wrong})")
        with hvd.Checkpointer(tmp_path, **arguments) as checkpointer:
            checkpointer.save(1)

    with pytest.raises(UsageError, match=words):
        save()


GENERATORS = {
    "python": random.Random,
    "pcg64": np.random.default_rng,
    **{
        name: lambda seed, name=name: np.random.Generator(getattr(np.random, name)(seed))
        for name in ("MT19937", "Philox", "SFC64", "PCG64DXSM")
    },
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draws(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(2, generator=generator).tolist()
    integers = getattr(generator, "integers", lambda _: None)
    return [generator.random(), integers(9), generator.random()]


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators(hvd, tmp_path, kind):
    def checkpointer(generator):
        return hvd.Checkpointer(
            tmp_path, model=torch.nn.Linear(1, 1), generators={"noise": generator}
        )

    saved, restored = GENERATORS[kind](1), GENERATORS[kind](2)
    draws(saved)
    with checkpointer(saved) as saving:
        saving.save(1)
    with checkpointer(restored) as restoring:
        restoring.restore()
    assert draws(restored) == draws(saved)
    other = GENERATORS["python" if kind == "MT19937" else "MT19937"](1)
    with (
        pytest.raises(HvdkitError, match=r"generators\['noise'\] "),
        checkpointer(other) as restoring,
    ):
        restoring.restore()


def test_a_global_generator_of_numpy_of_another_kind(hvd, tmp_path):
    model = torch.nn.Linear(1, 1)
    save_once(hvd, tmp_path, model=model)
    expected = torch.rand(1)
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(HvdkitError, match=r"NumPy's global generator .*MT19937.* PCG64"):
            restore_once(hvd, tmp_path, model=model)
        assert restore_once(hvd, tmp_path, strict=False, model=model) is not None
        assert torch.rand(1) == expected
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("kind", "key"), [(None, "pos"), ("MT19937", "pos"), ("Philox", "buffer_pos")]
)
def test_a_forged_position_of_a_generator_of_numpy(hvd, tmp_path, kind, key, strict):
    """NumPy would read other memory. kind: None for the global generator."""
    items = {"model": torch.nn.Linear(1, 1)}
    if kind is not None:
        items["generators"] = {"pos": GENERATORS[kind](1)}
    save_once(hvd, tmp_path, **items)
    step = step_folder(Store(tmp_path), 1)
    ranks, count = re.subn(rb'("%s": )\d+' % key.encode(), rb"\1-5", (step / RANKS).read_bytes())
    assert count
    forge(step, {RANKS: ranks})
    with pytest.raises(UsageError, match=f"the checkpoint has {key} -5"):
        restore_once(hvd, tmp_path, strict=strict, **items)


def stuck(tree):
    """Return the state of a generator with which it always draws the same number."""
    if isinstance(tree, list):
        return [stuck(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if "$bytes" not in tree:
        return {key: 2 if key == "inc" else stuck(value) for key, value in tree.items()}
    content = base64.b64decode(tree["$bytes"])
    # The words of torch have 64 bits.
    begin, size = (24, 8) if len(content) > 5000 else (0, 4)
    content = content[:begin] + bytes(624 * size) + content[begin + 624 * size :]
    return {"$bytes": base64.b64encode(content).decode()}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        *("python", "numpy", "torch", "own python", "own torch"),
        *("own MT19937", "own pcg64", "own PCG64DXSM"),
    ],
)
def test_a_forged_generator_that_always_draws_the_same_number(hvd, tmp_path, kind, strict):
    """Some functions discard this number, and would never return."""
    name, _, own = kind.rpartition(" ")
    generators = {"own": GENERATORS[own](1)} if name else {}
    items = {"model": torch.nn.Linear(1, 1), "generators": generators}
    save_once(hvd, tmp_path, **items)
    step = step_folder(Store(tmp_path), 1)
    line = json.loads((step / RANKS).read_text())
    changed = "generators" if name else kind
    line["random"][changed] = stuck(line["random"][changed])
    forge(step, {RANKS: json.dumps(line).encode() + b"\n"})
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=r"in the state of a .*generator: expected"):
        restore_once(hvd, tmp_path, strict=strict, **items)
    assert not strict or torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("names", [("noise", "new"), ("renamed",), ()])
def test_generators_with_other_names(hvd, tmp_path, names):
    own = {name: random.Random(2) for name in names}
    model = torch.nn.Linear(1, 1)
    save_once(hvd, tmp_path, model=model, generators={"noise": random.Random(1)})
    with pytest.raises(UsageError, match="has the generators 'noise', but generators= has "):
        restore_once(hvd, tmp_path, model=model, generators=own)
    restore_once(hvd, tmp_path, strict=False, model=model, generators=own)
    for name, generator in own.items():
        assert generator.random() == random.Random(1 if name == "noise" else 2).random()


@pytest.mark.parametrize(
    ("scheduler", "option", "said"),
    [
        ("CosineAnnealingLR", 3, "is a CosineAnnealingLR whose state has T_max"),
        # The state of a StepLR has all entries of an ExponentialLR.
        ("ExponentialLR", 0.5, "the saved state of a StepLR has step_size instead"),
    ],
)
def test_another_scheduler(hvd, tmp_path, scheduler, option, said):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    items = {"model": model, "optimizer": optimizer}
    save_once(hvd, tmp_path, lr_scheduler=lr_scheduler.StepLR(optimizer, 3), **items)
    other = getattr(lr_scheduler, scheduler)(optimizer, option)
    with pytest.raises(UsageError, match=said):
        restore_once(hvd, tmp_path, lr_scheduler=other, **items)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_with_entries_of_its_own_is_refused(hvd, tmp_path, wrapped):
    """A resumed run would lose these entries, and train to other weights."""

    class Lookahead(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "slow_state": {}}

    model = torch.nn.Linear(1, 1)
    optimizer = Lookahead(model.parameters(), 0.1)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)
    with (
        pytest.raises(UsageError, match="Lookahead, has the entries slow_state, which a checkp"),
        hvd.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer,
    ):
        checkpointer.save(1)


@pytest.mark.parametrize("grouped", [False, True])
def test_an_optimizer_with_its_parameters_in_another_order(hvd, tmp_path, grouped):
    """The state is saved by index, so a parameter would get the state of another one."""

    def trained(names, order):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
        groups = [{"params": list(model[name].parameters())} for name in order]
        optimizer = torch.optim.Adam(groups if grouped else model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.rand(parameter.shape)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained("ab", "ab")
    save_once(hvd, tmp_path, model=model, optimizer=optimizer)
    other, optimizer = trained("ab", "ba") if grouped else trained("ba", "ba")
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with hvd.Checkpointer(tmp_path, model=other, optimizer=optimizer) as restoring:
        with pytest.raises(UsageError, match=r"0 is model.b.weight here and model.a.weight in the"):
            restoring.restore()
        restoring.restore(strict=False)
    assert torch.equal(other["a"].weight, model["a"].weight)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)


def test_a_restore_in_a_loop_over_batches_is_an_error(hvd, tmp_path):
    """The loop would lose the steps of the rest of its epoch, or end with a misleading error."""
    data = torch.arange(20)
    sampler = hvd.ResumableSampler(data, batch_size=4, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    with hvd.Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), data=sampler) as checkpointer:
        for _ in range(2):
            batches = sampler.batches(loader)
            next(batches)
            checkpointer.save(1)
            next(batches)
            # Only a restore of the position ends the loop.
            checkpointer.restore(only=("model",))
            next(batches)
            checkpointer.restore()
            with pytest.raises(UsageError, match="restored in this loop over batches.*new loop"):
                next(batches)
            assert [batch[0].item() for batch in sampler.batches(loader)] == [4, 8, 12, 16]
            sampler.set_epoch(0)


def test_batches_have_a_length_and_the_loader_has_what_is_left(hvd):
    data = torch.arange(20)
    sampler = hvd.ResumableSampler(data, batch_size=4)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    batches = sampler.batches(loader)
    assert len(batches) == 5
    lengths = [(len(batches), len(loader), sampler.batches_per_epoch) for _ in batches]
    assert lengths == [(5, left, 5) for left in (4, 3, 2, 1, 0)]


class Lazy:
    """Iterates a loader when the first batch is taken, as tqdm does."""

    def __init__(self, loader):
        self.loader = loader
        self.generator = loader.generator

    def __iter__(self):
        yield from self.loader


class Thread(Lazy):
    """Reads a loader in a thread."""

    def __iter__(self):
        batches = queue.Queue()
        thread = threading.Thread(target=lambda: [*map(batches.put, [*self.loader, None])])
        thread.start()
        yield from iter(batches.get, None)
        thread.join()


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        ("plain", None),
        ("plain", Lazy),
        ("workers", Thread),
        ("no batches", Lazy),
        ("stateful", None),
        ("stateful", Lazy),
        ("generator", Thread),
    ],
)
def test_random_numbers_resume_with_a_wrapper_of_the_loader(hvd, kind, wrapper):
    """A wrapper may create the DataLoader's iterator late; the iterator draws a random number."""
    if kind == "stateful":
        pytest.importorskip("torchdata")
        from torchdata.stateful_dataloader import StatefulDataLoader as Loader
    else:
        from torch.utils.data import DataLoader as Loader

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, number):
            # In a worker or a thread, samples are read ahead.
            ahead = kind == "workers" or wrapper is Thread
            return number, 0.0 if ahead else torch.rand(()).item()

    def run(stop=None, state=None):
        size = 1 if kind == "no batches" else 2
        sampler = hvd.ResumableSampler(12, size, seed=1)
        generator = torch.Generator().manual_seed(2)
        loader = Loader(
            Noisy(),
            None if kind == "no batches" else size,
            sampler=sampler,
            num_workers=2 if kind == "workers" else 0,
            generator=generator if kind == "generator" else None,
        )
        torch.manual_seed(5)
        if state is not None:
            sampler.restore(sampler.plan_restore(state[0]))
            torch.set_rng_state(state[1])
            generator.set_state(state[2])
        seen = []
        for _ in range(sampler.epoch, 2):
            for numbers, noise in sampler.batches(wrapper(loader) if wrapper else loader):
                drawn = [torch.rand(()).item(), torch.rand((), generator=generator).item()]
                noise = torch.as_tensor(noise).tolist()
                seen.append([torch.as_tensor(numbers).tolist(), noise, *drawn])
                if len(seen) == stop:
                    return seen, (sampler.save(), torch.get_rng_state(), generator.get_state())
        return seen

    whole = run()
    first, state = run(stop=2)
    assert first + run(state=state) == whole


def test_a_loader_that_gives_other_batches_than_its_sampler_is_refused(hvd):
    """Batches in the order of their completion would be lost and repeated after a resume."""

    class WithoutLength(torch.utils.data.Dataset):
        def __getitem__(self, number):
            return number

    DataLoader = torch.utils.data.DataLoader
    sampler = hvd.ResumableSampler(10, 2)
    if "in_order" in inspect.signature(DataLoader).parameters:
        loader = DataLoader(range(10), 2, sampler=sampler, num_workers=2, in_order=False)
        words = "in_order=False and 2 workers: expected in_order=True"
        with pytest.raises(UsageError, match=words):
            sampler.batches(loader)
        # Without workers there is one order.
        loader = DataLoader(range(10), 2, sampler=sampler, in_order=False)
        assert len(list(sampler.batches(loader))) == 5
    for count in (9, 11):
        loader = DataLoader(range(count), 2, sampler=sampler)
        with pytest.raises(UsageError, match=f"has {count} samples, but its .* has 10: .*Subset"):
            sampler.batches(loader)
    loader = DataLoader(WithoutLength(), 2, sampler=sampler)
    assert len(list(sampler.batches(loader))) == 5


def test_numbers_and_orders_of_numpy(hvd):
    sampler = hvd.ResumableSampler(np.int64(10), np.int32(2), seed=np.uint8(1))
    same = hvd.ResumableSampler(10, 2, seed=1)
    assert sampler.save() == same.save()
    assert [batch.tolist() for batch in sampler.batches()] == [b.tolist() for b in same.batches()]
    for data, words in (
        (10.0, r"data is 10.0 of type float, which has no length: expected a data set"),
        (None, "data is None of type NoneType"),
        (True, "the number of samples is True: expected a whole number"),
        (np.int64(0), r"the number of samples is .*0.*: expected a whole number, at least 1"),
    ):
        with pytest.raises(UsageError, match=words):
            hvd.ResumableSampler(data, 2)
    for shape in ((10, 1), (1, 10), (2, 5)):
        sampler = hvd.ResumableSampler(10, 2, order=lambda drawn, _, s=shape: drawn.reshape(s))
        words = rf"array of shape \({shape[0]}, {shape[1]}\): expected .* array of shape \(10,\)"
        with pytest.raises(UsageError, match=words):
            next(sampler.batches())


class Block:
    """Models with a compiled or a plain submodule."""

    @staticmethod
    def model(compiled):
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


@pytest.mark.parametrize(("there", "here"), [*zip(COMPILED, [*COMPILED[1:], "no"], strict=True)])
def test_compiled_submodules(hvd, tmp_path, there, here):
    saved, restored = Block.model(there), Block.model(here)
    block = saved.block
    with torch.no_grad():
        block.norm.running_mean += 3
        block.norm.running_var *= 2
    save_once(hvd, tmp_path, model=saved)
    (step,) = Store(tmp_path).steps()
    names = [*safetensors_names(f"{step.location}/model.safetensors")]
    assert not [name for name in names if "_orig_mod" in name]
    assert "block.linear.weight" in names
    restore_once(hvd, tmp_path, model=restored)
    one, other = (list(each.state_dict().items()) for each in (saved, restored))
    for (name, tensor), (_, again) in zip(one, other, strict=True):
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, again), name
    assert restored.block.seen == 3
    assert restored.head.weight is restored.block.linear.weight


def safetensors_names(file):
    with safe_open(file, framework="np") as opened:
        return list(opened.keys())


@pytest.mark.parametrize(("here", "strict"), [("no", True), ("block", False), ("all", True)])
def test_names_with_a_prefix_from_an_earlier_version(hvd, tmp_path, here, strict):
    """Names had the prefix of `torch.compile` in their middle."""
    saved, restored = Block.model("block"), Block.model(here)
    with torch.no_grad():
        saved.block.norm.running_mean += 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "without_prefixes", lambda _: str)
        save_once(hvd, tmp_path, model=saved)
    (step,) = Store(tmp_path).steps()
    names = safetensors_names(f"{step.location}/model.safetensors")
    assert "block._orig_mod.linear.weight" in names
    restore_once(hvd, tmp_path, model=restored, strict=strict)
    assert torch.equal(restored.head.weight, saved.head.weight)
    assert restored.block.norm.running_mean.tolist() == [3] * 4
    assert restored.block.seen == 3


@pytest.mark.parametrize("wait", [True, False])
def test_one_element_of_any_stride(hvd, tmp_path, wait):
    model = torch.nn.Module()
    model.register_buffer("x", torch.arange(10.0)[5::5])
    model.register_buffer("y", torch.tensor([1 + 2j]).imag)
    with hvd.Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.save(1, wait=wait)
        model.x.zero_()
        model.y.zero_()
        checkpointer.restore()
    assert (model.x.item(), model.y.item()) == (5, 2)


def dtypes_of_torch():
    """Names of all dtypes of the torch that is installed, each once."""
    found = {
        value: name for name, value in sorted(vars(torch).items()) if type(value) is torch.dtype
    }
    return sorted(str(dtype).removeprefix("torch.") for dtype in found)


def random_tensor(dtype, shape):
    """Return a tensor of random bytes, reinterpreted as the dtype."""
    random_bytes = np.random.default_rng(3).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype == torch.bool:
        random_bytes &= 1
    return torch.from_numpy(random_bytes).view(dtype).reshape(shape)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_of_torch(hvd, tmp_path):
    """Each dtype is restored exactly, or its name is in the error."""
    kept, refused, told = [], [], []
    for name in dtypes_of_torch():
        dtype = getattr(torch, name)
        model, folder = torch.nn.Module(), tmp_path / name
        try:
            model.register_buffer("x", random_tensor(dtype, (3, 4)))
            model.register_buffer("scalar", random_tensor(dtype, ()))
            model.register_buffer("turned", random_tensor(dtype, (3, 4)).T)
        except (RuntimeError, NotImplementedError, TypeError):
            model.register_buffer("x", torch.empty(4, dtype=dtype))
        with hvd.Checkpointer(folder, model=model) as checkpointer:
            try:
                checkpointer.save(1, wait=True)
            except UsageError as error:
                refused.append(name)
                told.append(f"model['x'] is torch.{name}" in str(error))
                continue
            expected = {key: as_bytes(value) for key, value in model.state_dict().items()}
            for buffer in model.buffers():
                nothing = torch.zeros(buffer.numel() * dtype.itemsize, dtype=torch.uint8)
                buffer.copy_(nothing.view(dtype).view(buffer.shape))
            checkpointer.restore()
        found = {key: as_bytes(value) for key, value in model.state_dict().items()}
        assert found == expected, name
        with Store(folder).newest_good() as opened:
            export(opened, tmp_path / "x.pt")
            file = f"{opened.location}/model.safetensors"
        # As for any new file, so other users can read it if the umask allows it.
        (tmp_path / "new").touch()
        assert (tmp_path / "x.pt").stat().st_mode == (tmp_path / "new").stat().st_mode
        exported = torch.load(tmp_path / "x.pt", weights_only=True)
        assert {value.dtype for value in exported.values()} == {dtype}
        assert {key: as_bytes(value) for key, value in exported.items()} == expected, name
        raw = load_file(file)
        assert {key: as_bytes(value) for key, value in raw.items()} == expected, name
        if name == "complex128":
            assert torch.equal(torch.view_as_complex(raw["x"]), exported["x"])
        kept.append(name)
    assert all(told)
    assert {"complex128", "float8_e4m3fn", "float8_e5m2", "bfloat16", "uint64"} <= set(kept)
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert "float4_e2m1fn_x2" in refused
    assert not {name for name in refused if name.startswith(("float8", "complex"))}


def test_complex128_in_an_optimizer_and_partly(hvd, tmp_path):
    def items(value):
        model = torch.nn.Module()
        model.spectrum = torch.nn.Parameter(torch.full((3, 2), value, dtype=torch.complex128))
        model.other = torch.nn.Parameter(torch.ones(2 if value else 3))
        optimizer = torch.optim.Adam(model.parameters())
        if value:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * 2
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, partly, again = items(1 + 2j), items(0), items(1j)
    save_once(hvd, tmp_path, **saved)
    restore_once(hvd, tmp_path, strict=False, **partly)
    assert torch.equal(saved["model"].spectrum, partly["model"].spectrum)
    assert partly["model"].other.tolist() == [1, 1, 1]
    restore_once(hvd, tmp_path, **again)
    assert torch.equal(saved["model"].spectrum, again["model"].spectrum)
    one, two = (each["optimizer"].state[each["model"].spectrum] for each in (saved, again))
    assert one["exp_avg"].dtype == torch.complex128
    assert torch.equal(one["exp_avg"], two["exp_avg"])


@pytest.mark.parametrize("change", ["renamed", "dtype"])
def test_weights_that_are_not_restored_keep_their_optimizer_state(hvd, tmp_path, change):
    """Old moments would be wrong for new weights, and have the wrong dtype for narrow ones."""

    def trained(name, dtype, steps):
        model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), name: torch.nn.Linear(2, 1)})
        model[name].to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            output = model["body"](torch.ones(3, 2)).to(dtype)
            model[name](output).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained("old", torch.float32, 5)
    save_once(hvd, tmp_path, model=model, optimizer=optimizer)
    new = ("new", torch.float32) if change == "renamed" else ("old", torch.bfloat16)
    for steps in (0, 1):
        model, optimizer = trained(*new, steps)
        head = list(model[new[0]].parameters())
        before = [dict(optimizer.state.get(p, {})) for p in head]
        restore_once(hvd, tmp_path, model=model, optimizer=optimizer, strict=False)
        assert [dict(optimizer.state.get(p, {})) for p in head] == before
        assert all(optimizer.state[p]["step"] == 5 for p in model["body"].parameters())
        # Without the model, the user asks for the whole state.
        with hvd.Checkpointer(tmp_path, model=model, optimizer=optimizer) as restoring:
            restoring.restore(strict=False, only=("optimizer",))
        assert all(optimizer.state[p]["step"] == 5 for p in model.parameters())


def trained_linear():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def with_copies(name):
    """Return a module whose `state_dict` has copies."""

    class Copying(torch.nn.ModuleDict):
        def state_dict(self, *args, **kwargs):
            return {k: v.clone() for k, v in super().state_dict(*args, **kwargs).items()}

    return Copying({name: torch.nn.Linear(2, 1)})


@pytest.mark.parametrize("trained", ["before", "here"])
def test_a_model_that_is_not_in_the_checkpoint_keeps_its_optimizer_state(hvd, tmp_path, trained):
    model, optimizer = trained_linear()
    if trained == "here":
        optimizer.state.clear()
    save_once(hvd, tmp_path, model=model, optimizer=optimizer)
    model, optimizer = trained_linear()
    if trained == "before":
        optimizer.state.clear()
    restore_once(hvd, tmp_path, model={"net": model}, optimizer=optimizer, strict=False)
    assert len(optimizer.state) == (2 if trained == "here" else 0)


@pytest.mark.parametrize("name", ["old", "new"])
def test_a_state_dict_of_copies_restored_in_part(hvd, tmp_path, name):
    """The optimizer state follows the parameter, whose memory is not in the `state_dict`."""
    model, restored = with_copies("old"), with_copies(name)
    optimizer, own = (torch.optim.Adam(each.parameters()) for each in (model, restored))
    model["old"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_once(hvd, tmp_path, model=model, optimizer=optimizer)
    restore_once(hvd, tmp_path, strict=False, model=restored, optimizer=own)
    assert torch.equal(model["old"].weight, restored[name].weight) == (name == "old")
    assert bool(own.state) == (name == "old")


def test_a_parameter_that_one_of_two_models_restores(hvd, tmp_path):
    def items(name, trained):
        shared, optimizer = trained_linear()
        if not trained:
            optimizer.state.clear()
        models = {"a": torch.nn.ModuleDict({"x": shared}), "b": torch.nn.ModuleDict({name: shared})}
        return shared, {"model": models, "optimizer": optimizer}

    shared, saved = items("x", trained=True)
    save_once(hvd, tmp_path, **saved)
    again, restored = items("y", trained=False)
    restore_once(hvd, tmp_path, strict=False, **restored)
    assert torch.equal(shared.weight, again.weight)
    assert restored["optimizer"].state[again.weight]["step"] == 1


def test_statistics_of_a_layer_that_changed(hvd, tmp_path):
    """Statistics are the state of one rank. Nothing else compares their sizes."""
    saved, model = (
        torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))
        for width in (3, 4)
    )
    model[1].running_mean.fill_(4.0)
    save_once(hvd, tmp_path, model=saved)
    restore_once(hvd, tmp_path, strict=False, model=model)
    assert model[1].running_mean.tolist() == [4.0] * 4


def test_a_scaler_that_was_disabled(hvd, tmp_path):
    """torch's `load_state_dict` would refuse the empty state after other items are restored."""
    saved, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    off, on = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True))
    before = model.weight.item()
    save_once(hvd, tmp_path, model=saved, scaler=off)
    with pytest.raises(UsageError, match="is an enabled GradScaler, but was disabled when"):
        restore_once(hvd, tmp_path, model=model, scaler=on)
    assert model.weight.item() == before
    restore_once(hvd, tmp_path, strict=False, model=model, scaler=on)
    assert torch.equal(model.weight, saved.weight)


SUBCLASSES = """
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

class Named(torch.Tensor):
    "Without code of its own for operations."

class Scaled(torch.Tensor):
    "As quantised tensors are: the content is in other tensors."
    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale
    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        plain = [a.inner * a.scale if isinstance(a, Scaled) else a for a in args]
        return function(*plain, **(kwargs or {}))

class Watched(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})

class OwnParameter(torch.nn.Parameter):
    pass
"""


def subclasses():
    found = {}
    exec(SUBCLASSES, found)
    return found


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("Scaled", "parameter"),
        ("Watched", "buffer"),
        ("Scaled", "optimizer"),
        ("Watched", "scheduler"),
    ],
)
def test_a_tensor_of_a_class_with_its_own_operations_is_refused(hvd, tmp_path, kind, place):
    own = subclasses()
    content = torch.ones(2)
    odd = own["Scaled"](content, 3.0) if kind == "Scaled" else content.as_subclass(own[kind])
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    names = {
        "parameter": r"model\['0.odd'\]",
        "buffer": r"model\['0.odd'\]",
        "optimizer": r"optimizer\['state'\]\['x'\]\['y'\]",
        "scheduler": r"lr_scheduler\['odd'\]",
    }
    if place == "parameter":
        model[0].odd = torch.nn.Parameter(odd)
    elif place == "buffer":
        model[0].register_buffer("odd", odd)
    optimizer = torch.optim.SGD(model[0].parameters())
    if place == "optimizer":
        optimizer.state["x"] = {"y": odd}

    class Scheduler:
        def state_dict(self):
            return {"odd": odd if place == "scheduler" else 1}

        def load_state_dict(self, state):
            pass

    said = f"{names[place]} is a .*{kind}, .* expected a torch.Tensor"
    with (
        hvd.Checkpointer(
            tmp_path, model=model, optimizer=optimizer, lr_scheduler=Scheduler()
        ) as checkpointer,
        pytest.raises(UsageError, match=said),
    ):
        checkpointer.save(1)


def test_tensors_of_classes_without_operations_of_their_own(hvd, tmp_path):
    own = subclasses()
    model = torch.nn.Module()
    model.a = own["OwnParameter"](torch.arange(3.0))
    model.register_buffer("b", torch.arange(3).as_subclass(own["Named"]))
    if hasattr(torch.nn, "Buffer"):
        model.c = torch.nn.Buffer(torch.ones(2))
    with hvd.Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.save(1)
        with torch.no_grad():
            model.a.zero_()
            model.b.zero_()
        checkpointer.restore()
    assert model.a.tolist() == [0, 1, 2]
    assert model.b.tolist() == [0, 1, 2]
    assert type(model.a) is own["OwnParameter"]
    assert type(model.b) is own["Named"]


def test_parameters_without_a_shape_yet(hvd, tmp_path):
    def model():
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2))

    said = r"model\['1.weight'\] is not initialised.* one batch"
    checkpointer = hvd.Checkpointer(tmp_path, model=model())
    with checkpointer, pytest.raises(UsageError, match=said):
        checkpointer.save(1)
    whole = model()
    whole(torch.ones(1, 2))
    save_once(hvd, tmp_path, model=whole)
    checkpointer = hvd.Checkpointer(tmp_path, model=model())
    with checkpointer, pytest.raises(UsageError, match=said):
        checkpointer.restore()


def test_exports_that_safetensors_loads(hvd, tmp_path):
    """A tied weight, extra state and a compiled submodule, in one file and in several."""
    saved = Block.model("block")
    with torch.no_grad():
        saved.block.norm.running_mean += 3
    save_once(hvd, tmp_path / "steps", model=saved)
    with Store(tmp_path / "steps").newest_good() as opened:
        export(opened, tmp_path / "x.pt")
        (tmp_path / "other").touch()
        # Other users may read them too: both follow the umask.
        assert (tmp_path / "x.pt").stat().st_mode == (tmp_path / "other").stat().st_mode
        weights.export_file(opened, tmp_path / "x.safetensors")
        weights.export_folder(opened, tmp_path / "folder", shard_bytes=100)
    expected = {
        name: value
        for name, value in torch.load(tmp_path / "x.pt", weights_only=True).items()
        if isinstance(value, torch.Tensor)
    }

    plain = torch.nn.Sequential()
    plain.block = torch.nn.Module()
    plain.block.linear, plain.block.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    plain.head = torch.nn.Linear(4, 4)
    plain.head.weight = plain.block.linear.weight
    load_model(plain, tmp_path / "x.safetensors")
    assert expected.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected[name]), name

    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    state = {}
    for file in set(index["weight_map"].values()):
        state |= load_file(tmp_path / "folder" / file)
    assert state.keys() == index["weight_map"].keys() == expected.keys() - {"head.weight"}
    assert sum(value.nbytes for value in state.values()) == index["metadata"]["total_size"]
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


def test_an_export_has_the_arrays_of_the_extra_state(hvd, tmp_path):
    model = WithExtraState(2, 2)
    model.extra = {"array": np.arange(3), "tensor": torch.ones(2)}
    save_once(hvd, tmp_path, model=model)
    with Store(tmp_path).newest_good() as opened:
        export(opened, tmp_path / "x.pt")
    model = WithExtraState(2, 2)
    model.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=False))
    assert model.extra["array"].tolist() == [0, 1, 2]
    assert model.extra["tensor"].tolist() == [1, 1]


@pytest.mark.parametrize("compiled", COMPILED)
def test_statistics_of_compiled_submodules(hvd, compiled):
    saved, restored = Block.model(compiled), Block.model("no")
    with torch.no_grad():
        saved.block.norm.running_mean += 3
    own = Statistics({"model": saved}).save()
    assert own.keys() == Statistics({"model": restored}).save().keys()
    Statistics({"model": restored}).restore(own)
    assert restored.block.norm.running_mean.tolist() == [3] * 4
    # The names in earlier versions.
    earlier = {f"model._orig_mod.{name.removeprefix('model.')}": own[name] for name in own}
    for model in (Block.model("no"), Block.model(compiled)):
        Statistics({"model": model}).restore(earlier)
        assert model.block.norm.running_mean.tolist() == [3] * 4


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_buffers_of_a_wrapper_with_the_state_dict_of_its_module(hvd, there, here):
    """Simulated: the module that Fabric's `setup` returns."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self._forward_module = module

        def state_dict(self, **options):
            return self._forward_module.state_dict(**options)

    def statistics(wrapped, value):
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
        module[0].running_mean.fill_(value)
        module.register_buffer("seen", torch.full((1,), value))
        temporary = torch.ones(1).to_sparse()
        module.register_buffer("temporary", temporary, persistent=False)
        found = Statistics({"model": Wrapper(module) if wrapped else module})
        found.select(found.digests())
        return found, module

    saved, restored = statistics(there, 3.0)[0], statistics(here, 0.0)
    assert saved.digests().keys() == {"model.seen"}
    tree = saved.save()
    restored[0].restore(tree)
    module = restored[1]
    assert [module[0].running_mean.item(), module.seen.item()] == [3.0, 3.0]
    # The names of earlier versions in a wrapper.
    earlier = {f"model._forward_module.{n.removeprefix('model.')}": tree[n] for n in tree}
    if here:
        module[0].running_mean.zero_()
        restored[0].restore(earlier)
        assert module[0].running_mean.item() == 3.0


def test_one_rank_has_no_buffers_that_differ(hvd, tmp_path):
    handler = logging.handlers.BufferingHandler(1000)
    logging.getLogger("hvdkit.torch").addHandler(handler)
    for call in (save_once, restore_once):
        call(hvd, tmp_path, model=torch.nn.BatchNorm1d(600_000))
    logging.getLogger("hvdkit.torch").removeHandler(handler)
    assert not [record for record in handler.buffer if record.levelno >= logging.WARNING]
