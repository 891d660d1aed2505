"""A rank that counts: a `worker.Workload` without a framework."""

import os
import sys


class Counting:
    def __init__(self, spec):
        self._rank = spec["rank"]
        self._count = 0

    def facts(self):
        return {"rank": self._rank}

    def answer(self, command, message):
        if command == "fail":
            print("the last words of this rank", flush=True)
            sys.exit(3)
        if command == "sum":
            self._count += message["number"]
        return {"rank": self._rank, "count": self._count, "pid": os.getpid()}

    def close(self):
        pass


def build(spec):
    if spec.get("broken"):
        raise SystemExit("this rank cannot be built")
    return Counting(spec)
