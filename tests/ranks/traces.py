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


def check_nesting(trace):
    """Check that events of a thread contain each other, or do not overlap. Viewers need this."""
    threads = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            threads[event["pid"], event["tid"]].append((begin, -length, event["name"]))
    for thread, events_of_thread in threads.items():
        outer = []
        for begin, negative, name in sorted(events_of_thread):
            event = (begin - negative, begin, name, *thread)
            while outer and outer[-1][0] <= begin:
                outer.pop()
            assert not outer or event[0] <= outer[-1][0], (event, outer[-1])
            outer.append(event)


def check(hvd, trace, steps):
    """Check a trace; return the largest error of a clock in microseconds."""
    check_nesting(trace)
    ranks = list(range(hvd.size()))
    found, collectives = spans(trace)
    assert list(found) == [f"step {n}" for n in steps]
    assert all(sorted(of_rank) == ranks for of_rank in found.values())
    every_step = [name for name, calls in collectives.items() if len(calls[0]) == len(steps)]
    assert len(every_step) >= 3
    error = trace["otherData"]["clock_error_us"]
    for of_rank in collectives.values():
        assert sorted(of_rank) == ranks
        for rank, calls in of_rank.items():
            # Each lies inside of a step. TensorFlow also has collectives that are not in each step.
            for begin, end in calls:
                inside = [
                    step
                    for step in found.values()
                    if step[rank][0][0] - 2 <= begin <= end <= step[rank][0][1] + 2
                ]
                assert len(inside) == 1
        for together in zip(*of_rank.values(), strict=True):
            # No rank ends it before all have called it.
            assert max(b for b, _ in together) <= min(e for _, e in together) + 2 * error + 2
    return error
