"""The jobs of a part: start the ranks of a program, and collect one answer from each rank.

A rank's program is a module `gpu_checks.NAME_ranks`. It reads its spec from the command line
(`spec`) and prints one answer (`answer`), from which `Job.answers` takes it.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from gpu_checks.part import REPOSITORY, Setting
from hvdkit.ranks import start_gloo

_ANSWER = "ANSWER "

#: Makes a job of one rank take the full path through Horovod.
FULL_PATH = {"HVDKIT_SINGLE_RANK_COLLECTIVES": "1"}

#: Lets two ranks over NCCL use the same GPU.
SHARED_GPU = {"HVDKIT_SHARE_GPUS": "1"}

#: The CUDA stream waits for a collective, and the host does not.
ASYNC = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}


class Clock:
    """The time that a part has left.

    Args:
        seconds: the time that the part may take in all.
        spare: seconds kept for the end of the part.
    """

    def __init__(self, seconds: float, spare: float = 5.0) -> None:
        self._end = time.monotonic() + seconds - spare

    def left(self) -> float:
        """Return the seconds left; at least 0."""
        return max(self._end - time.monotonic(), 0.0)


class Job:
    """The running ranks of one job, a context manager that ends them.

    Args:
        setting: of the part.
        engine: `nccl` or `staged`: the environment of the ranks.
        module: the rank's program, `gpu_checks.MODULE`.
        spec: the program's input, plain values.
        size: number of ranks.
        env: environment variables beside this process's.

    Raises:
        ValueError: no environment has the engine.
    """

    def __init__(
        self,
        setting: Setting,
        engine: str,
        module: str,
        spec: Mapping[str, Any],
        size: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if engine not in setting.pythons:
            raise ValueError(f"no environment has the engine {engine}: see the part build")
        self._group = start_gloo(
            [setting.pythons[engine], "-m", f"gpu_checks.{module}", json.dumps(spec)],
            size,
            env={**os.environ, **(env or {})},
            cwd=REPOSITORY,
        )

    def running(self) -> bool:
        """Return whether a rank is still running."""
        return self._group.running()

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for the ranks and return their answers, by rank.

        Raises:
            RanksFailed: a rank failed or did not end within `seconds`.
            ValueError: a rank ended without an answer.
        """
        results = self._group.wait(seconds)
        answers = []
        for result in results:
            lines = [x for x in result.output.splitlines() if x.startswith(_ANSWER)]
            if not lines:
                raise ValueError(f"rank {result.rank} gave no answer:\n{result.output[-1000:]}")
            answers.append(json.loads(lines[-1].removeprefix(_ANSWER)))
        return answers

    def stop(self) -> None:
        """End the ranks."""
        self._group.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def spec() -> dict[str, Any]:
    """Return the spec of this rank."""
    return json.loads(sys.argv[1])


def answer(content: Mapping[str, Any]) -> None:
    """Print this rank's answer."""
    # Other output may have ended without a newline.
    print(f"\n{_ANSWER}{json.dumps(content)}", flush=True)
