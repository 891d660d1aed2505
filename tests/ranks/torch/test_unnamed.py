"""Collectives without a name, which ranks match in order."""

import random
import sys
import threading
import time

import torch

from tests.ranks.rank_pool import Configuration, start_ranks_of


def in_thread(call, *arguments):
    """Call a function in another thread; return its result or its error in a list."""
    found = []

    def run():
        try:
            found.append(call(*arguments))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_the_main_thread_and_another_one_do_not_mix_their_values(hvd):
    def reduce(factor):
        for number in range(100):
            if random.random() < 0.3:
                time.sleep(0.001)
            total = hvd.allreduce(torch.full((3,), factor * number), op=hvd.Sum)
            assert total.tolist() == [factor * number * hvd.size()] * 3
        return "right"

    thread, found = in_thread(reduce, 1000.0)
    own = reduce(1.0)
    thread.join(60)
    assert (own, found) == ("right", ["right"])


def test_a_thread_after_another_one(hvd):
    for number in (1.0, 2.0):
        thread, found = in_thread(hvd.allreduce, torch.full((1,), number))
        thread.join(60)
        assert [total.item() for total in found] == [number]


def run(code, ranks):
    job = start_ranks_of(Configuration("torch", "gloo", ranks), [sys.executable, "-c", code])
    return [result.output for result in job.wait(timeout=60)]


TWO_THREADS = """
import threading
import torch
import hvdkit.torch as hvd

errors = []

def reduce(factor):
    try:
        for number in range(1000):
            hvd.allreduce(torch.full((3,), factor * number), op=hvd.Sum)
    except Exception as error:
        errors.append(error)

hvd.init()
threads = [threading.Thread(target=reduce, args=(n,), name=f"by {n}") for n in (1, 2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
# Also the thread that another rank has refused.
assert len(errors) == 2, errors
print(*(str(error) for error in errors if isinstance(error, ValueError)))
"""


def test_two_threads_beside_the_main_thread_are_an_error_on_all_ranks():
    # On a rank whose second thread is late, both errors may be those of the other rank's shutdown.
    refused = [output for output in run(TWO_THREADS, ranks=2) if output.strip()]
    assert refused
    for output in refused:
        assert "from the threads 'by 1' and 'by 2'" in output or "'by 2' and 'by 1'" in output
        assert "Give each of these calls a name" in output


NEW_NUMBERS = """
import contextlib
import torch
import hvdkit.torch as hvd
from horovod.torch import mpi_ops

def total(**options):
    return hvd.allreduce(torch.ones(1), op=hvd.Sum, **options).item()

hvd.init()
first = hvd.rank() == 0
alone = hvd.add_process_set([0])
number = alone.process_set_id
if first:
    total(process_set=alone)
hvd.remove_process_set(alone)
both = hvd.add_process_set([0, 1])
assert both.process_set_id == number
if both.included():
    assert total(process_set=both) == 2
hvd.barrier()
hvd.shutdown()
if first:
    with contextlib.suppress(Exception):
        mpi_ops.allreduce(torch.ones(1))
hvd.init()
print(total())
"""


def test_numbers_begin_again_in_a_new_process_set_and_after_init():
    """Otherwise ranks that have made other calls before wait for different names."""
    assert run(NEW_NUMBERS, ranks=3) == ["3.0\n"] * 3
