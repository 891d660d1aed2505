"""Checks of the traces that `hvd.profile` writes."""

from collections import defaultdict

from hvdkit.profiling import events


def spans(trace):
    """Return the steps and the collectives of each rank: name -> rank -> [(begin, end)]."""
    steps, collectives = (defaultdict(lambda: defaultdict(list)) for _ in range(2))
    for event in trace["traceEvents"]:
        rank, process = divmod(event["pid"], 1000)
        if event["ph"] == "X" and process == events.HVDKIT:
            kind, name = steps, event["name"]
            if "collective" in event.get("args", {}):
                kind, name = collectives, event["args"]["collective"]
            kind[name][rank].append((event["ts"], event["ts"] + event["dur"]))
    return steps, collectives


def check(hvd, trace, steps):
    """Check a trace; return the largest error of a clock in microseconds."""
    ranks = list(range(hvd.size()))
    found, collectives = spans(trace)
    assert list(found) == [f"step {n}" for n in steps]
    assert all(sorted(of_rank) == ranks for of_rank in found.values())
    buckets = [name for name in collectives if "rounds.header" not in name]
    assert len(buckets) >= 3
    error = trace["otherData"]["clock_error_us"]
    for of_rank in collectives.values():
        assert sorted(of_rank) == ranks
        for rank, calls in of_rank.items():
            # Each lies inside of its step.
            assert len(calls) == len(steps)
            for number, (begin, end) in zip(steps, calls, strict=True):
                ((step_begin, step_end),) = found[f"step {number}"][rank]
                assert step_begin - 2 <= begin <= end <= step_end + 2
        for together in zip(*of_rank.values(), strict=True):
            # No rank ends it before all have called it.
            assert max(b for b, _ in together) <= min(e for _, e in together) + 2 * error + 2
    return error
