"""Train a network to read Morse code of any length, with PyTorch.

The signals are made on the spot: words at different speeds, with noise. Each step of all ranks has
signals of similar lengths, which are padded, and the last batch of an epoch may be smaller on some
ranks. The loss is the mean over the signals of all ranks, so any number of ranks trains the same
model:

    hvdkit run -np 2 python examples/torch_morse.py

Checkpoints are in runs/torch_morse. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/torch_morse.py --resume
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import hvdkit.torch as hvd

#: The signs of the letters A to Z. Their classes are 1 to 26; class 0 is the blank of CTC.
SIGNS = """
    .- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. --
    -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --..
""".split()  # noqa: SIM905


def signal_of(word: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a noisy signal, float32 [frames], at a random speed."""
    frames = rng.integers(2, 4)  # of a dot
    parts = [np.zeros(frames)]
    for letter in word:
        for sign in SIGNS[letter]:
            parts += [np.ones(frames * (3 if sign == "-" else 1)), np.zeros(frames)]
        parts.append(np.zeros(2 * frames))
    clean = np.concatenate(parts)
    return (clean + rng.normal(0, 0.2, len(clean))).astype(np.float32)


def draw(count: int, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return signals, and the letters of each as numbers from 1 to 26."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(26, size=rng.integers(1, 6)) for _ in range(count)]
    signals = [torch.from_numpy(signal_of(word, rng)) for word in words]
    return signals, [torch.from_numpy(word + 1) for word in words]


class Reader(nn.Module):
    """A convolution and a recurrent network; the result does not depend on the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 32, kernel_size=7, stride=2, padding=3)
        self.rnn = nn.GRU(32, 64, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(128, 27)

    def forward(self, signals: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log probabilities, [frames, signals, classes], and the frames of each signal."""
        lengths = torch.tensor([(len(signal) + 1) // 2 for signal in signals])
        padded = pad_sequence(signals, batch_first=True)
        x = self.conv(padded.unsqueeze(1)).relu().transpose(1, 2)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.scores(x).log_softmax(-1).transpose(0, 1), lengths


def losses_of(model: nn.Module, signals: list, words: list) -> torch.Tensor:
    """Return the loss of each signal."""
    log_chances, lengths = model(signals)
    letters = torch.tensor([len(word) for word in words])
    losses = functional.ctc_loss(
        log_chances, torch.cat(words), lengths, letters, reduction="none", zero_infinity=True
    )
    return losses / letters


def distance(found: list[int], wanted: list[int]) -> int:
    """Return the number of letters to insert, delete or replace (Levenshtein)."""
    row = list(range(len(wanted) + 1))
    for i, letter in enumerate(found, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(wanted, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1]


@torch.no_grad()
def error_rate(model: nn.Module, signals: list, words: list) -> float:
    """Return the share of wrong letters; each rank reads its share of the signals."""
    mine = slice(hvd.rank(), None, hvd.size())
    log_chances, lengths = model(signals[mine])
    totals = torch.zeros(2)
    for chances, length, word in zip(
        log_chances.transpose(0, 1), lengths, words[mine], strict=True
    ):
        best = chances[:length].argmax(-1).unique_consecutive()
        totals += torch.tensor([distance(best[best > 0].tolist(), word.tolist()), len(word)])
    wrong, letters = hvd.allreduce(totals, op=hvd.Sum).tolist()
    return wrong / letters


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default 12)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="signals per step, of all ranks (default 32)"
    )
    parser.add_argument("--signals", type=int, default=2001, help="to train on (default 2001)")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate (default 5e-3)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/torch_morse")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    torch.manual_seed(args.seed)
    signals, words = draw(args.signals, seed=1)
    frames = np.array([len(signal) for signal in signals])

    def by_length(numbers: np.ndarray, _epoch: int) -> np.ndarray:
        """Sort the samples of every 16 steps by length. In each epoch these are other samples."""
        windows = np.split(numbers, range(16 * args.batch_size, len(numbers), 16 * args.batch_size))
        return np.concatenate([w[np.argsort(frames[w], kind="stable")] for w in windows])

    sampler = hvd.ResumableSampler(
        signals, args.batch_size // hvd.size(), seed=args.seed, order=by_length
    )
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    total = args.epochs * sampler.batches_per_epoch
    schedule = hvd.WarmupCosine(args.lr, total, total // 10)

    with hvd.Checkpointer(
        args.checkpoint_dir,
        model=model,
        optimizer=optimizer,
        data=sampler,
        every_steps=args.checkpoint_every,
        overwrite=not args.resume,
    ) as checkpointer:
        restored = checkpointer.restore() if args.resume else None
        step = restored.step if restored else 0
        if restored and hvd.rank() == 0:
            print(f"resumed after step {step}", flush=True)
        for epoch in range(sampler.epoch, args.epochs):
            for numbers in sampler.batches():
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step)
                batch = [signals[i] for i in numbers], [words[i] for i in numbers]
                losses = losses_of(model, *batch)
                totals = torch.stack([losses.detach().sum(), torch.tensor(float(len(losses)))])
                loss_sum, count = hvd.allreduce(totals, op=hvd.Sum, name="loss").tolist()
                optimizer.zero_grad()
                # The mean over the ranks, which hvdkit takes, becomes the mean over all signals.
                (losses.sum() * hvd.size() / count).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step += 1
                if step % 20 == 0 and hvd.rank() == 0:
                    print(f"step {step} loss {loss_sum / count:.4f}", flush=True)
                checkpointer.maybe_save(step, epoch)
        if restored is None or step > restored.step:
            checkpointer.save(step, args.epochs)

    figure = error_rate(model, *draw(300, seed=2))
    if hvd.rank() == 0:
        print(f"error_rate={figure:.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
