"""Simulated jobs: each rank calls its collectives in turn, until it waits, sleeps or has ended.

The oracle of a drawn job is its fault. The records have what the engine's flight recorder writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdkit.faults.records import Call, Record

#: In the program of a rank: it sleeps.
SLEEPS = "sleeps"
WAITING = """Thread 0x01 (most recent call first):
  <no Python frame>

Current thread 0x02 (most recent call first):
  File "/venv/site-packages/horovod/torch/mpi_ops.py", line 1324 in synchronize
  File "/home/me/train.py", line 23 in <module>
"""
SLEEPING = """Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 5 in recv
  File "/home/me/loader.py", line 7 in load
  File "/home/me/train.py", line 23 in <module>
"""


def call(name, number, at, ended=None, group=0):
    return Call(f"allreduce.{name}", number, "allreduce", group, "float32", 64, at, ended)


def run(
    programs: Sequence[Sequence[str | tuple[int, str]]],
    sets: Sequence[Sequence[int]] = (),
    order: Sequence[int] = (),
    clocks: Mapping[int, float] | None = None,
) -> dict[int, Record]:
    """Return the records of a job, 60 s after its last call.

    Args:
        programs: for each rank, the names of its collectives, with their process set if it is not
            that of all ranks; or `SLEEPS`.
        sets: the ranks of each process set, from set 1 on.
        order: ranks, in the order in which they run until they wait.
        clocks: rank -> seconds by which its clock is ahead.
    """
    size = len(programs)
    groups = {0: [], **dict(enumerate(sets, 1))}
    at, counts, done = [0] * size, [{} for _ in range(size)], [[] for _ in range(size)]
    waiting, clock = {}, 0.0

    def go(rank):
        """Run a rank until it waits; return whether it has made progress."""
        nonlocal clock
        began, program = at[rank], programs[rank]
        while rank not in waiting and at[rank] < len(program) and program[at[rank]] != SLEEPS:
            each = program[at[rank]]
            at[rank] += 1
            group, name = (0, each) if isinstance(each, str) else each
            clock += 0.01
            key = group, f"allreduce.{name}"
            counts[rank][key] = counts[rank].get(key, 0) + 1
            own = waiting[rank] = call(name, counts[rank][key], clock, group=group)
            members = groups[group] or range(size)
            if all(other in waiting and waiting[other].key == own.key for other in members):
                for other in members:
                    done[other].append(replace(waiting.pop(other), ended=clock))
        return at[rank] > began

    progress = True
    while progress:
        progress = any([go(rank) for rank in order or range(size)])  # noqa: C419, each rank runs
    records = {
        rank: Record(
            rank, size, f"host{rank}", 1, "stall", clock + 60.0, groups=groups, calls=counts[rank],
            open=[waiting[rank]] if rank in waiting else [], done=done[rank],
            stacks=WAITING if rank in waiting else SLEEPING,
            labels={"bucket": "bucket 1 of 1 (a to b; 1.0 MB)"},
        )
        for rank in range(size)
    }  # fmt: skip
    return {rank: r.shifted((clocks or {}).get(rank, 0.0)) for rank, r in records.items()}


def simulate(size, program, stops=None, extra=None):
    """Return the records of a job in which some ranks leave the common program.

    Args:
        size: the number of ranks.
        program: the names of the collectives that all ranks call.
        stops: rank -> the position in the program before which it stops.
        extra: rank -> a collective that it calls there.
    """
    programs = [list(program) for _ in range(size)]
    for rank, position in (stops or {}).items():
        programs[rank][position:] = [(extra or {}).get(rank, SLEEPS)]
    return run(programs)


def waits_in_sets(*waits):
    """Return the records of ranks that wait: process set and name of each rank's call."""
    return run([[each] for each in waits], sets=([0, 1], [0, 2], [2, 3]))
