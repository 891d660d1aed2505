"""Train a recommender whose embedding table is divided among the ranks, with PyTorch.

Each rank has some rows of the table and their optimizer state (model parallelism), and a copy of
the dense layers (data parallelism). The ranks exchange rows and their gradients by alltoall. With a
batch size of all ranks together, any number of ranks trains the same model:

    hvdkit run -np 2 python examples/torch_recommender.py

Checkpoints are in runs/torch_recommender. A run that was stopped or killed resumes, also with
another number of ranks:

    hvdkit run -np 4 python examples/torch_recommender.py --resume
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import hvdkit.torch as hvd

USERS, ITEMS, WIDTH = 8_000, 2_000, 16


class DividedTable(nn.Module):
    """An embedding table of which each rank has a block of rows.

    Attributes:
        first: the number of the first row of this rank.
        rows: the rows of this rank.
    """

    def __init__(self, total: int, seed: int) -> None:
        super().__init__()
        self._block = -(-total // hvd.size())  # rows of a rank; the last ones may have fewer
        self.first = min(hvd.rank() * self._block, total)
        # Each rank draws the whole table, so that it does not depend on the number of ranks. If the
        # table is too large for one rank, draw only this rank's rows.
        table = 0.1 * torch.randn(total, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.rows = nn.Parameter(table[self.first : self.first + self._block].clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows with these numbers. A collective, and so is its backward pass."""
        # Collectives of every step have names, so that Horovod's cache can serve them.
        wanted, place = ids.unique(return_inverse=True)  # sorted, so also sorted by rank
        counts = torch.bincount(wanted // self._block, minlength=hvd.size()).int()
        asked, asked_by = hvd.alltoall(wanted, splits=counts, name="ids")
        found = functional.embedding(asked - self.first, self.rows, sparse=True)
        rows, _ = hvd.alltoall(found, splits=asked_by, name="rows")
        return rows[place]


def dense_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))


def scores_of(table: nn.Module, dense: nn.Module, pairs: torch.Tensor) -> torch.Tensor:
    """Return a score for each pair of a user and an item, int64 [pairs, 2]."""
    users, items = table((pairs + torch.tensor([0, USERS])).flatten()).view(-1, 2, WIDTH).unbind(1)
    products = users * items
    return products.sum(1) + dense(torch.cat([users, items, products], dim=1)).squeeze(1)


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of users and items, and whether the user clicks on the item.

    Users and items have four hidden features, from a seed that is always the same.
    """
    rng = np.random.default_rng(0)
    users, items = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
    popularity = rng.normal(size=ITEMS)
    rng = np.random.default_rng(seed)
    pairs = np.stack([rng.integers(USERS, size=count), rng.integers(ITEMS, size=count)], axis=1)
    liking = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) + popularity[pairs[:, 1]] - 1
    clicks = rng.random(count) < 1 / (1 + np.exp(-liking))
    return torch.from_numpy(pairs), torch.from_numpy(clicks.astype(np.float32))


@torch.no_grad()
def area_under_curve(table: nn.Module, dense: nn.Module, count: int = 40_000) -> float:
    """Return the chance that a pair with a click has a higher score than one without."""
    pairs, clicks = draw(count, seed=2)
    mine = slice(hvd.rank(), None, hvd.size())
    scores = hvd.allgather(scores_of(table, dense, pairs[mine]))
    clicks = hvd.allgather(clicks[mine].contiguous())[scores.argsort()]
    places = torch.arange(1, count + 1, dtype=torch.float64)
    yes = clicks.sum().double()
    return ((places[clicks > 0].sum() - yes * (yes + 1) / 2) / (yes * (count - yes))).item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data (default 2)")
    parser.add_argument(
        "--batch-size", type=int, default=2048, help="pairs per step, of all ranks (default 2048)"
    )
    parser.add_argument("--pairs", type=int, default=1_000_000, help="(default 1,000,000)")
    parser.add_argument("--lr", type=float, default=2e-3, help="of the dense layers (default 2e-3)")
    parser.add_argument("--table-lr", type=float, default=0.1, help="(default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/torch_recommender")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise Adagrad prints a warning
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    torch.manual_seed(args.seed)
    pairs, clicks = draw(args.pairs, seed=1)
    sampler = hvd.ResumableSampler(
        len(pairs), args.batch_size // hvd.size(), seed=args.seed, drop_last=True
    )
    table, dense = DividedTable(USERS + ITEMS, args.seed), dense_layers()
    # Not wrapped: no other rank has these rows. They get the gradients of all ranks by alltoall.
    table_optimizer = torch.optim.Adagrad(table.parameters(), lr=args.table_lr)
    optimizer = torch.optim.Adam(dense.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, dense.named_parameters())
    hvd.broadcast_parameters(dense.state_dict(), root_rank=0)

    def shard(rows: object) -> hvd.Shard:
        return hvd.Shard(rows, table.first, USERS + ITEMS)

    with hvd.Checkpointer(
        args.checkpoint_dir,
        model=dense,
        optimizer=optimizer,
        sharded={
            "table": shard(table.rows),
            "table.sum": shard(lambda: table_optimizer.state[table.rows]["sum"]),
        },
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
                scores = scores_of(table, dense, pairs[numbers])
                loss = functional.binary_cross_entropy_with_logits(scores, clicks[numbers])
                optimizer.zero_grad()
                table_optimizer.zero_grad()
                loss.backward()
                # The sum over the ranks of the gradients of their means, so divide as hvdkit does.
                table.rows.grad /= hvd.size()
                optimizer.step()
                table_optimizer.step()
                step += 1
                if step % 50 == 0:
                    mean = hvd.allreduce(loss.detach()).item()  # of all ranks
                    if hvd.rank() == 0:
                        print(f"step {step} loss {mean:.4f}", flush=True)
                checkpointer.maybe_save(step, epoch)
        if restored is None or step > restored.step:
            checkpointer.save(step, args.epochs)

    figure = area_under_curve(table, dense)
    if hvd.rank() == 0:
        print(f"auc={figure:.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
