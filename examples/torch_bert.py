"""Train a small BERT to fill in masked words of Python's language reference, with PyTorch.

In each epoch other words are masked. Which ones depends on the seed, the epoch and the number of
the sample only. With a batch size of all ranks together, any number of ranks trains the same model:

    hvdkit run -np 2 python examples/torch_bert.py

Checkpoints are in runs/torch_bert. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/torch_bert.py --resume
"""

import argparse
import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import hvdkit.torch as hvd

WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 32
WORDS, MASKED = 2000, 5  # the size of the vocabulary; masked words per sample, about 15 %
UNKNOWN, MASK = 0, 1


class Bert(nn.Module):
    """A transformer that reads the whole sample, and predicts the words at some of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        # Without dropout, which would depend on the number of ranks; the model is too small for it
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.scores = nn.Linear(WIDTH, WORDS)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.scores.weight = self.words.weight  # tied: one parameter with two names

    def forward(self, text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.words(text) + self.places.weight)
        chosen = x.gather(1, places.unsqueeze(-1).expand(-1, -1, WIDTH))
        return self.scores(self.head(chosen))


class Masked(Dataset):
    """Samples with some words masked: 80 % by MASK, 10 % by a random word, 10 % not at all."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        text = self.samples[number].clone()
        places = torch.randperm(CONTEXT)[:MASKED]
        words = text[places]
        how = torch.rand(MASKED)
        random_words = torch.randint(2, WORDS, (MASKED,))
        text[places] = torch.where(how < 0.8, MASK, torch.where(how < 0.9, random_words, words))
        return text, places, words


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of CONTEXT words for training and for validation, the same on every rank."""
    words = re.findall(r"[A-Za-z]+|[0-9]|[^\w\s]", " ".join(topics[t] for t in sorted(topics)))
    common = [word for word, _ in Counter(words).most_common(WORDS - 2)]
    numbers = {word: number for number, word in enumerate(common, start=2)}
    text = torch.tensor([numbers.get(word, UNKNOWN) for word in words])
    samples = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    samples = samples[torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))]
    return samples[320:], samples[:320]


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset) -> float:
    """Return the part of the masked words that the model finds. Each rank tests some samples."""
    model.eval()
    share = hvd.ResumableSampler(dataset, 16, shuffle=False)  # a rank may repeat one sample
    loader = DataLoader(share.seeded(dataset), 16, sampler=share)
    totals = torch.zeros(2)
    for text, places, words in loader:
        totals[0] += (model(text, places).argmax(-1) == words).sum()
        totals[1] += words.numel()
    correct, count = hvd.allreduce(totals, op=hvd.Sum).tolist()
    return correct / count


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only, wrapped."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return hvd.DistributedOptimizer(torch.optim.AdamW(groups, lr=lr), model.named_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=6, help="passes over the text (default 6)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="samples per step, of all ranks (default 32)"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3)")
    parser.add_argument("--workers", type=int, default=0, help="loader processes (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/torch_bert")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    batch_size = args.batch_size // hvd.size()
    torch.manual_seed(args.seed)
    train, validation = (Masked(samples) for samples in load_text())
    sampler = hvd.ResumableSampler(train, batch_size, seed=args.seed, drop_last=True)
    loader = DataLoader(
        sampler.seeded(train), batch_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    model = Bert()
    optimizer = optimizer_for(model, args.lr)
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
            model.train()
            for text, places, words in sampler.batches(loader):
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step)
                scores = model(text, places)
                loss = functional.cross_entropy(scores.flatten(0, 1), words.flatten())
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step += 1
                if step % 20 == 0:
                    mean = hvd.allreduce(loss.detach()).item()  # of all ranks
                    if hvd.rank() == 0:
                        print(f"step {step} loss {mean:.4f}", flush=True)
                checkpointer.maybe_save(step, epoch)
        if restored is None or step > restored.step:
            checkpointer.save(step, args.epochs)

    figure = accuracy(model, validation)
    if hvd.rank() == 0:
        print(f"accuracy={figure:.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
