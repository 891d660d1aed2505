"""Train a policy by REINFORCE to balance gymnasium's CartPole, with PyTorch.

Each step plays some episodes, which the ranks share. The start and the actions of an episode depend
on its number only. The loss is the mean over the moves of all episodes, so each rank divides its
sum by the number of moves of all ranks. So any number of ranks trains the same policy:

    pip install gymnasium
    hvdkit run -np 2 python examples/torch_cartpole.py

Checkpoints are in runs/torch_cartpole. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/torch_cartpole.py --resume
"""

import argparse

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn import functional

import hvdkit.torch as hvd

DISCOUNT = 0.99


class Agent(nn.Module):
    """Two small networks: the scores of both actions, and the expected return."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))


@torch.no_grad()
def play(agent: Agent, numbers: range, seed: int, greedy: bool = False) -> list[dict]:
    """Play the episodes with these numbers side by side; return their moves."""
    episodes = []
    for number in numbers:
        environment = gymnasium.make("CartPole-v1")
        observation, _ = environment.reset(seed=seed + number)
        rng = np.random.default_rng([seed, number])
        episodes.append({"environment": environment, "rng": rng, "next": observation})
        episodes[-1].update(observations=[], actions=[], rewards=[])
    live = episodes
    while live:
        # In float64, so that an action hardly ever depends on the number of rows.
        observations = torch.tensor(np.stack([e["next"] for e in live]), dtype=torch.float64)
        right = agent.actor(observations).softmax(1)[:, 1].tolist()
        going_on = []
        for episode, probability in zip(live, right, strict=True):
            draw = 0.5 if greedy else episode["rng"].random()
            action = int(draw < probability)
            episode["observations"].append(episode["next"])
            episode["actions"].append(action)
            moved = episode["environment"].step(action)
            episode["next"], reward, fallen, at_limit, _ = moved
            episode["rewards"].append(reward)
            if not (fallen or at_limit):
                going_on.append(episode)
        live = going_on
    return episodes


def returns_of(rewards: list[float]) -> list[float]:
    """Return the discounted sum of the rewards from each move on."""
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + DISCOUNT * total
        returns.append(total)
    return returns[::-1]


def batch_of(episodes: list[dict]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the observations, actions and returns of all moves."""
    observations = np.concatenate([np.stack(e["observations"]) for e in episodes])
    actions = np.concatenate([e["actions"] for e in episodes])
    returns = np.concatenate([returns_of(e["rewards"]) for e in episodes])
    return torch.tensor(observations).double(), torch.tensor(actions), torch.tensor(returns)


def normalized(values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the values with mean 0 and deviation 1 over all ranks, and their number there."""
    sums = torch.stack([torch.ones_like(values).sum(), values.sum(), values.square().sum()])
    count, total, squares = hvd.allreduce(sums, op=hvd.Sum, name="moves").tolist()
    mean = total / count
    return (values - mean) / max(squares / count - mean**2, 1e-12) ** 0.5, count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="of the optimizer (default 100)")
    parser.add_argument(
        "--episodes", type=int, default=16, help="per step, of all ranks (default 16)"
    )
    parser.add_argument("--lr", type=float, default=1e-2, help="first learning rate (default 1e-2)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/torch_cartpole")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.episodes < hvd.size():
        parser.error(f"--episodes {args.episodes}: expected at least one for each rank")
    torch.manual_seed(args.seed)
    agent = Agent().double()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, agent.named_parameters())
    hvd.broadcast_parameters(agent.state_dict(), root_rank=0)
    schedule = hvd.WarmupCosine(args.lr, args.steps)

    with hvd.Checkpointer(
        args.checkpoint_dir,
        model=agent,
        optimizer=optimizer,
        every_steps=args.checkpoint_every,
        overwrite=not args.resume,
    ) as checkpointer:
        restored = checkpointer.restore() if args.resume else None
        first = restored.step if restored else 0
        if restored and hvd.rank() == 0:
            print(f"resumed after step {first}", flush=True)
        for step in range(first + 1, args.steps + 1):
            begin = (step - 1) * args.episodes
            mine = range(begin + hvd.rank(), begin + args.episodes, hvd.size())
            observations, actions, returns = batch_of(play(agent, mine, args.seed))
            values = agent.critic(observations).squeeze(1)
            advantages, moves = normalized(returns - values.detach())
            log_chances = agent.actor(observations).log_softmax(1)
            chosen = log_chances.gather(1, actions[:, None]).squeeze(1)
            loss = -(chosen * advantages).sum() + 1e-3 * functional.mse_loss(
                values, returns, reduction="sum"
            )
            for group in optimizer.param_groups:
                group["lr"] = schedule(step - 1)
            optimizer.zero_grad()
            # The mean over the ranks, which hvdkit takes, becomes the mean over all moves.
            (loss * hvd.size() / moves).backward()
            optimizer.step()
            if step % 10 == 0 and hvd.rank() == 0:
                print(f"step {step} mean return {moves / args.episodes:.1f}", flush=True)
            checkpointer.maybe_save(step)
        if args.steps > first:
            checkpointer.save(args.steps)

    tests = range(hvd.rank(), 40, hvd.size())
    lengths = [len(e["rewards"]) for e in play(agent, tests, seed=10**6, greedy=True)]
    totals = torch.tensor([sum(lengths), len(lengths)])
    moves, episodes = hvd.allreduce(totals, op=hvd.Sum).tolist()
    if hvd.rank() == 0:
        print(f"mean_return={moves / episodes:.1f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
