"""Resumable data on real ranks: batch samplers, StatefulDataLoader, objects with a state."""

import importlib.util
import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.folders import shared_folder

needs_torchdata = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed"
)

SAMPLES = 41
EPOCHS = 3


def stateful_loader(*args, **how):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*args, **how)


class Numbers(Dataset):
    """This rank's samples."""

    def __init__(self, hvd):
        self.own = range(hvd.rank(), SAMPLES, hvd.size())

    def __len__(self):
        return len(self.own)

    def __getitem__(self, i):
        return self.own[i]


class Seeds(Numbers):
    """A data set that also returns the seed of the worker."""

    def __getitem__(self, i):
        return self.own[i], get_worker_info().seed


class Stream(IterableDataset):
    """Shuffles this rank's samples in a buffer. Every worker has its share and its state."""

    def __init__(self, hvd):
        self.own = range(hvd.rank(), SAMPLES, hvd.size())
        self.generator = torch.Generator().manual_seed(hvd.rank())
        self.noise = np.random.default_rng(hvd.rank())
        self.python = random.Random(hvd.rank())
        self.place, self.buffer = 0, []

    def __iter__(self):
        # A new epoch. A state is loaded after this.
        self.place, self.buffer = 0, []
        return self

    def __next__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        share = self.own[worker::workers]
        while self.place < len(share) and len(self.buffer) < 4:
            self.buffer.append(share[self.place])
            self.place += 1
        if not self.buffer:
            raise StopIteration
        chosen = torch.randint(len(self.buffer), (), generator=self.generator)
        return self.buffer.pop(int(chosen)), self.noise.random(), self.python.random()

    def state_dict(self):
        return {
            "place": self.place,
            "buffer": torch.tensor(self.buffer, dtype=torch.int64),
            "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "generator": self.generator.get_state(),
            "noise": self.noise.bit_generator.state,
            "array": np.arange(6, dtype=np.float32).reshape(2, 3),
            "python": self.python.getstate(),
            "nested": {"bytes": b"\0\xff", 3: (None, [True])},
        }

    def load_state_dict(self, state):
        assert type(state["array"]) is np.ndarray
        assert (state["array"] == np.arange(6).reshape(2, 3)).all()
        assert state["array"].dtype == np.float32
        assert state["half"].dtype == torch.bfloat16
        assert state["nested"] == {"bytes": b"\0\xff", 3: (None, [True])}
        self.place = state["place"]
        self.buffer = state["buffer"].tolist()
        self.generator.set_state(state["generator"])
        self.noise.bit_generator.state = state["noise"]
        self.python.setstate(state["python"])


LOADERS = {
    "shuffled": lambda hvd: stateful_loader(Numbers(hvd), batch_size=3, shuffle=True),
    "shuffled, workers": lambda hvd: stateful_loader(
        Numbers(hvd), batch_size=3, shuffle=True, num_workers=2
    ),
    "batch sampler": lambda hvd: stateful_loader(
        Numbers(hvd), batch_sampler=BatchSampler(range(len(Numbers(hvd))), 3, False)
    ),
    "stream": lambda hvd: stateful_loader(Stream(hvd), batch_size=3),
    "stream, workers": lambda hvd: stateful_loader(Stream(hvd), batch_size=3, num_workers=2),
    "stream, workers that stay": lambda hvd: stateful_loader(
        Stream(hvd), batch_size=3, num_workers=2, persistent_workers=True
    ),
    "stream, every third step": lambda hvd: stateful_loader(
        Stream(hvd), batch_size=2, num_workers=2, snapshot_every_n_steps=3
    ),
    "distributed sampler": lambda hvd: stateful_loader(
        range(SAMPLES), batch_size=3, sampler=hvd.DistributedSampler(range(SAMPLES), drop_last=True)
    ),
    "generator": lambda hvd: stateful_loader(
        Numbers(hvd), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "generator, workers": lambda hvd: stateful_loader(
        Seeds(hvd), batch_size=3, num_workers=2, generator=torch.Generator().manual_seed(5)
    ),
}


class Place:
    """A user's data source with a state."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Run:
    """Run a loop as in the guide; record each batch and a random number drawn after it."""

    def __init__(self, hvd, make):
        # Another process has other random numbers, until they are restored.
        torch.manual_seed(1000 + hvd.rank())
        self.hvd = hvd
        self.loader = make(hvd)
        # Where ranks have different numbers of batches, they are in different epochs.
        self.epoch = Place(0)
        self.data = {"loader": self.loader, "epoch": self.epoch}
        self.seen = []

    def train(self, epochs, step=0, save=None, checkpointer=None, until=None):
        for epoch in epochs:
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(epoch)
            self.epoch.value = epoch
            for batch in self.loader:
                parts = batch if isinstance(batch, list) else [batch]
                self.seen.append((epoch, *(p.tolist() for p in parts), torch.rand(()).item()))
                step += 1
                if step == save:
                    checkpointer.save(step, epoch)
                if step == until:
                    return


def same_as(seen, expected):
    for step, (had, wanted) in enumerate(zip(seen, expected, strict=False)):
        assert had == wanted, f"batch {step}: {had}, expected {wanted}"
    assert len(seen) == len(expected)


def undisturbed(hvd, make):
    run = Run(hvd, make)
    torch.manual_seed(hvd.rank())
    run.train(range(EPOCHS))
    return run.seen


def interrupted(hvd, make, folder, saves, beyond):
    """Train in several jobs, each of which trains `beyond` steps that are lost after its save."""
    seen = []
    for save in [*saves, None]:
        run = Run(hvd, make)
        with checkpointer_of(hvd, folder, run.data) as checkpointer:
            torch.manual_seed(hvd.rank() if not seen else 99)
            restored = checkpointer.restore()
            step = restored.step if restored else 0
            assert step == len(seen)
            until = None if save is None else save + beyond
            run.train(range(run.epoch.value, EPOCHS), step, save, checkpointer, until)
        seen += run.seen if save is None else run.seen[: save - step]
    return seen


# Workers take long to start.
SLOW = ("shuffled, workers", "stream, workers that stay")


@needs_torchdata
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.long if k in SLOW else ()) for k in LOADERS]
)
def test_a_loader_with_a_state_resumes_at_any_batch(hvd, kind):
    make = LOADERS[kind]
    expected = undisturbed(hvd, make)
    everyone = hvd.allgather_object(expected)
    for epoch in range(EPOCHS):
        samples = [s for own in everyone for record in own if record[0] == epoch for s in record[1]]
        assert max(Counter(samples).values()) == 1
        dropped = SAMPLES % hvd.size() if kind == "distributed sampler" else 0
        assert len(samples) == SAMPLES - dropped
    # Equal numbers on all ranks, and different ones for each kind.
    draw = random.Random(kind)
    steps = min(len(own) for own in everyone)
    saves = sorted(draw.sample(range(1, steps), 3))
    with shared_folder(hvd) as folder:
        seen = interrupted(hvd, make, folder, saves, draw.randrange(3))
        same_as(seen, expected)


@needs_torchdata
@pytest.mark.parametrize("kind", ["shuffled", "stream, workers"])
def test_a_save_between_epochs_resumes_with_the_next_one(hvd, kind):
    make = LOADERS[kind]
    expected = undisturbed(hvd, make)
    with shared_folder(hvd) as folder:
        seen = []
        for epoch in range(EPOCHS):
            run = Run(hvd, make)
            with checkpointer_of(hvd, folder, run.data) as checkpointer:
                if checkpointer.restore() is None:
                    torch.manual_seed(hvd.rank())
                    # Before the first batch.
                    checkpointer.save(0, 0)
                run.train([epoch])
                checkpointer.save(epoch + 1, epoch + 1)
            seen += run.seen
        same_as(seen, expected)


def checkpointer_of(hvd, folder, data, **how):
    model = nn.Linear(1, 1)
    hvd.register_local(model)  # each rank has random weights
    return hvd.Checkpointer(folder, model=model, data=data, **how)


def test_several_data_keep_their_places(hvd):
    with shared_folder(hvd) as folder:
        sampler = hvd.ResumableSampler(40, 2)
        data = {"text": Place(hvd.rank()), "more": Place([hvd.rank()]), "images": sampler}
        with checkpointer_of(hvd, folder, data) as checkpointer:
            next(sampler.batches())
            checkpointer.save(1)
        position = sampler.position
        assert position.consumed
        data = {"text": Place(), "more": Place(), "images": hvd.ResumableSampler(40, 2)}
        with checkpointer_of(hvd, folder, data) as checkpointer:
            checkpointer.restore()
        assert data["text"].value == hvd.rank()
        assert data["more"].value == [hvd.rank()]
        assert data["images"].position == position
        # A position that ranks disagree about is an error by its own name, too.
        with checkpointer_of(hvd, folder, data, overwrite=True) as checkpointer:
            if hvd.rank() == 1:
                data["images"].advance()
            with pytest.raises(UsageError, match="the position in 'data-images'"):
                checkpointer.save(2)


def test_another_number_of_ranks_is_refused(hvd):
    alone = hvd.add_process_set([0])
    with shared_folder(hvd) as folder:
        if hvd.rank() == 0:
            with checkpointer_of(hvd, folder, Place(7), process_set=alone) as checkpointer:
                checkpointer.save(3)
        hvd.barrier()
        place = Place("as it was")
        model = nn.Linear(1, 1)
        with hvd.Checkpointer(folder, model=model, data=place) as checkpointer:
            before = model.weight.item()
            said = f"step 3 was saved by 1 rank, and this job has {hvd.size()}: data "
            words = f"{said}.*strict=False"
            with pytest.raises(UsageError, match=words):
                checkpointer.restore()
            assert model.weight.item() == before
            assert checkpointer.restore(only=("model",)).step == 3
            with recorded("hvdkit.checkpoint") as log:
                assert checkpointer.restore(strict=False).step == 3
            texts = " ".join(record.getMessage() for record in log)
            assert (said in texts) == (hvd.rank() == 0)
            assert "divided anew" not in texts
            assert place.value == "as it was"
    hvd.remove_process_set(alone)


def test_a_checkpoint_without_a_place_in_the_data_is_refused(hvd):
    with shared_folder(hvd) as folder:
        with checkpointer_of(hvd, folder, hvd.ResumableSampler(40, 2)) as checkpointer:
            checkpointer.save(1)
        with checkpointer_of(hvd, folder, Place(5)) as checkpointer:
            with pytest.raises(UsageError, match="step 1 has no per-rank state of data"):
                checkpointer.restore()
            assert checkpointer.restore(strict=False).step == 1
    with shared_folder(hvd) as folder:
        with checkpointer_of(hvd, folder, Place(5)) as checkpointer:
            checkpointer.save(1)
        sampler = hvd.ResumableSampler(40, 2)
        with (
            checkpointer_of(hvd, folder, sampler) as checkpointer,
            pytest.raises(UsageError, match="has no data"),
        ):
            checkpointer.restore()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("set", r"data\['value'\]\['deep'\]\[1\] is a builtins.set, which a checkpoint"),
        ("sparse", r"data\['value'\]\['deep'\]\[1\].*sparse"),
        ("text", r"the state of data takes \d+ bytes on this rank.*at most"),
        ("error", r"data: state_dict\(\) of the Faulty raised KeyError: 'boom'"),
    ],
)
def test_a_state_that_cannot_be_kept_is_an_error_on_all_ranks(hvd, kind, words):
    value = {
        "set": lambda: {1, 2},
        "sparse": lambda: torch.eye(2).to_sparse(),
        "text": lambda: "x" * 20_000_000,
        "error": lambda: KeyError("boom"),
    }[kind]()

    class Faulty(Place):
        def state_dict(self):
            if isinstance(self.value, Exception):
                raise self.value
            return {"value": {"deep": [0, self.value]}}

    bad = hvd.size() - 1
    with (
        shared_folder(hvd) as folder,
        checkpointer_of(hvd, folder, Faulty(value if hvd.rank() == bad else 1)) as checkpointer,
    ):
        with pytest.raises(UsageError, match=f"rank {bad}: {words}"):
            checkpointer.save(1)
        assert checkpointer.steps() == []


def test_ranks_with_different_kinds_of_data_get_an_error(hvd):
    sampler = hvd.ResumableSampler(40, 2)
    data = Place() if hvd.rank() == 1 else sampler
    with (
        shared_folder(hvd) as folder,
        checkpointer_of(hvd, folder, data) as checkpointer,
        pytest.raises(UsageError, match="about which items have a state on each rank"),
    ):
        checkpointer.save(1)


def test_a_state_that_one_rank_cannot_restore_is_an_error_on_all_ranks(hvd):
    class Loader(DataLoader):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise AssertionError("not called")

    with shared_folder(hvd) as folder:
        with checkpointer_of(hvd, folder, Loader(range(4))) as checkpointer:
            checkpointer.save(1)
        loader = Loader(range(4), num_workers=hvd.rank())
        with checkpointer_of(hvd, folder, loader) as checkpointer:
            words = "rank 1: data was saved with num_workers 0.*nothing was restored"
            with pytest.raises(UsageError, match=words):
                checkpointer.restore()
            with pytest.raises(UsageError, match="disagree about which parts of the"):
                checkpointer.restore(strict=False)


@needs_torchdata
def test_a_stream_without_a_state_is_refused(hvd):
    class Silent(IterableDataset):
        def __iter__(self):
            return iter(range(40))

    loader = stateful_loader(Silent(), batch_size=3, num_workers=2)
    with shared_folder(hvd) as folder, checkpointer_of(hvd, folder, loader) as checkpointer:
        next(iter(loader))
        with pytest.raises(UsageError, match="IterableDataset without a state"):
            checkpointer.save(1)


@needs_torchdata
def test_a_stateful_loader_takes_a_resumable_sampler(hvd):
    numbers = TensorDataset(torch.arange(SAMPLES))

    def make(sampler, workers):
        loader = stateful_loader(numbers, batch_size=3, sampler=sampler, num_workers=workers)
        with pytest.raises(UsageError, match="data=sampler"):
            checkpointer_of(hvd, folder, loader)
        return loader

    with shared_folder(hvd) as folder:
        expected = batches_of(hvd, folder, make, stop=9)
        assert batches_of(hvd, folder, make, workers=2) == expected[9:]


def test_data_without_a_state_are_refused(hvd):
    sampler = hvd.ResumableSampler(40, 2)
    numbers = TensorDataset(torch.arange(40))
    for data, words in (
        (DataLoader(Stream(hvd), batch_size=2), "IterableDataset.*StatefulDataLoader"),
        (DataLoader(numbers, batch_size=2), "hvd.ResumableSampler.*StatefulDataLoader"),
        (DataLoader(numbers, batch_size=2, sampler=sampler), "data=sampler"),
        (DataLoader(numbers, batch_sampler=BatchSampler(sampler, 2, False)), "data=sampler"),
        (
            hvd.DistributedSampler(numbers),
            r"DistributedSampler: expected.*load_state_dict\(state\)",
        ),
        ({"a": sampler, "b": [1, 2]}, "data-b is a list: expected"),
        ({"not a name": sampler}, "not a name"),
    ):
        with pytest.raises(UsageError, match=words):
            checkpointer_of(hvd, "/nowhere", data)


# --- batch samplers over a ResumableSampler -----------------------------------------------------


def batches_of(hvd, folder, make, *, stop=None, workers=0, drop_last=False, **how):
    """The batches of two epochs, from the checkpoint on where there is one."""
    sampler = hvd.ResumableSampler(SAMPLES, 3, seed=2, drop_last=drop_last, **how)
    loader = make(sampler, workers)
    with checkpointer_of(hvd, folder, sampler) as checkpointer:
        if stop is None:
            checkpointer.restore()
        seen = []
        for _ in range(sampler.epoch, 2):
            for batch in sampler.batches(loader):
                seen.append([number.tolist() for number in batch])
                if len(seen) == stop:
                    checkpointer.save(stop)
        return seen


@pytest.mark.parametrize(("workers", "drop_last"), [(0, False), (2, True)])
def test_torchs_batch_sampler_resumes(hvd, workers, drop_last):
    numbers = TensorDataset(torch.arange(SAMPLES))

    def plain(sampler, workers):
        return DataLoader(numbers, batch_size=3, sampler=sampler, num_workers=workers)

    def batched(sampler, workers):
        by = BatchSampler(sampler, 3, drop_last)
        return DataLoader(numbers, batch_sampler=by, num_workers=workers)

    def seeded(sampler, workers):
        by = BatchSampler(sampler, 3, drop_last)
        return DataLoader(sampler.seeded(numbers), batch_sampler=by, num_workers=workers)

    with shared_folder(hvd) as folder:
        stop = random.Random(workers).randrange(1, 12)
        how = {"workers": workers, "drop_last": drop_last}
        expected = batches_of(hvd, folder, plain, stop=stop, drop_last=drop_last)
        assert batches_of(hvd, folder, batched, **how) == expected[stop:]
        assert batches_of(hvd, folder, seeded, **how) == expected[stop:]


def test_batches_that_are_samples_of_their_own(hvd):
    class Batches(Dataset):
        """Ready-made batches of different sizes."""

        def __len__(self):
            return SAMPLES

        def __getitem__(self, number):
            return torch.full((1 + number % 4,), number)

    def run(stop=None):
        sampler = hvd.ResumableSampler(Batches(), 1, seed=5)
        loader = DataLoader(Batches(), batch_size=None, sampler=sampler)
        with checkpointer_of(hvd, folder, sampler) as checkpointer:
            if stop is None:
                checkpointer.restore()
            seen = []
            for batch in sampler.batches(loader):
                seen.append(batch.tolist())
                if len(seen) == stop:
                    checkpointer.save(stop)
            return seen

    with shared_folder(hvd) as folder:
        expected = run(stop=4)
        assert run() == expected[4:]
        assert all(len(set(batch)) == 1 for batch in expected)


LENGTHS = np.random.default_rng(3).integers(1, 100, SAMPLES)


def by_length(numbers, epoch):
    """Sort windows of 12 samples by length."""
    windows = np.split(numbers, range(12, len(numbers), 12))
    return np.concatenate([w[np.argsort(LENGTHS[w], kind="stable")] for w in windows])


def test_samples_in_an_order_of_the_users_own_resume(hvd):
    numbers = TensorDataset(torch.arange(SAMPLES))

    def make(sampler, workers):
        return DataLoader(numbers, batch_size=3, sampler=sampler, num_workers=workers)

    with shared_folder(hvd) as folder:
        stop = 5
        expected = batches_of(hvd, folder, make, stop=stop, order=by_length)
        assert batches_of(hvd, folder, make, order=by_length) == expected[stop:]
        everyone = hvd.allgather_object(expected)
        half = len(expected) // 2
        seen = Counter(i for own in everyone for batch in own[:half] for i in batch[0])
        assert set(seen) == set(range(SAMPLES))
        # The first window, dealt out in turns: batches of all ranks are of similar lengths.
        dealt = [LENGTHS[i] for place in range(3) for own in everyone for i in [own[0][0][place]]]
        assert dealt == sorted(dealt)
        with pytest.raises(UsageError, match="another order of the samples"):
            batches_of(hvd, folder, make)
        with pytest.raises(UsageError, match="another order of the samples"):
            batches_of(hvd, folder, make, order=lambda numbers, epoch: numbers[::-1])


def test_an_order_that_is_none_is_refused(hvd):
    for order, words in (
        (lambda numbers, epoch: numbers[1:], "40 values.*expected each integer from 0 to 40 once"),
        (lambda numbers, epoch: numbers * 0, "expected each integer from 0 to 40 once"),
        (lambda numbers, epoch: numbers + 0.5, "expected each integer from 0 to 40 once"),
        (lambda numbers, epoch: None, "expected each integer from 0 to 40 once"),
    ):
        sampler = hvd.ResumableSampler(SAMPLES, 3, order=order)
        with pytest.raises(UsageError, match=words):
            next(sampler.batches())
    with pytest.raises(UsageError, match="order is 'length'.*expected a function"):
        hvd.ResumableSampler(SAMPLES, 3, order="length")


def test_ranks_with_different_orders_get_an_error(hvd):
    order = by_length if hvd.rank() else lambda numbers, epoch: numbers[::-1]
    sampler = hvd.ResumableSampler(SAMPLES, 3, order=order)
    with shared_folder(hvd) as folder, checkpointer_of(hvd, folder, sampler) as checkpointer:
        next(sampler.batches())
        with pytest.raises(UsageError, match="disagree about the position in 'data'"):
            checkpointer.save(1)


class Custom(BatchSampler):
    """A user's `BatchSampler` that reverses each batch."""

    def __iter__(self):
        return (batch[::-1] for batch in super().__iter__())


def test_batch_samplers_that_do_not_fit_are_refused(hvd):
    data = TensorDataset(torch.arange(40))
    sampler = hvd.ResumableSampler(data, 2)
    other = hvd.ResumableSampler(data, 2)
    for by, words in (
        (BatchSampler(sampler, 3, False), "batch_size 3, but its ResumableSampler has 2"),
        (BatchSampler(sampler, 2, True), "drop_last=True"),
        (BatchSampler(other, 2, False), "another sampler"),
        (BatchSampler(range(40), 2, False), "another sampler"),
        (Custom(sampler, 2, False), "batch_sampler of type Custom.*order="),
        ([[0, 1], [2, 3]], "batch_sampler of type list.*order="),
    ):
        with pytest.raises(UsageError, match=words):
            next(sampler.batches(DataLoader(data, batch_sampler=by)))
    for loader, words in (
        (DataLoader(data, batch_size=2), "another sampler"),
        (DataLoader(data, batch_size=None, sampler=sampler), "batch_size None, but its Resumable"),
        (DataLoader(data, batch_size=2, sampler=sampler, drop_last=True), "drop_last=True"),
        (DataLoader(Stream(hvd), batch_size=2), "IterableDataset"),
        ([0] * (sampler.batches_left - 3), "ended 3 batches before"),
    ):
        with pytest.raises(UsageError, match=words):
            list(sampler.batches(loader))
    assert not sampler.uncounted
    assert list(itertools.islice(sampler.batches(), 1))
