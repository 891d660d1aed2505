"""`hvdkit why` on folders whose files are large: what is read is limited, and the text says so."""

import json
import time

import pytest

from hvdkit.faults.command import why
from hvdkit.faults.records import read
from hvdkit.faults.waits import find_waits
from hvdkit.system.plain_files import Budget
from tests.unit.faults.test_command import RECORD
from tests.unit.launch.commands import output_of

#: The content of 100 MB, the file that is being read, and the process with its modules.
_MEMORY = 300_000_000
WHY = """
import pathlib, sys
from hvdkit.faults.command import why
from hvdkit.system.plain_files import Budget
print(why(pathlib.Path(sys.argv[1]), budget=Budget(100_000_000)))
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


def write(folder, rank, **fields):
    record = RECORD | {"rank": rank} | fields
    (folder / f"rank-{rank}.json").write_text(json.dumps(record))


def waiting(count, **fields):
    """Return the fields of a record of a rank that waits for so many collectives."""
    call = RECORD["done"][0] | {"ended": None}
    own = [call | {"name": f"allreduce.{i}"} for i in range(count)]
    return {"error": "", "failed": "", "reason": "stall", "done": [], "open": own} | fields


def test_the_largest_records_are_left_out(tmp_path):
    for rank in range(4):
        large = {str(i): 1 for i in range(100_000)} if rank in (1, 2) else {}
        write(tmp_path, rank, **waiting(1, size=4, groups={"0": []}, calls={"0": large}))
    text = why(tmp_path, budget=Budget(10_000_000))
    assert "Ranks 0, 1, 3 have waited" in text
    # Nothing is known of rank 2. It is not the cause.
    assert "Rank 2 has not called" not in text
    assert f"Not read, or not to the end: {tmp_path}/rank-2.json. The content of all" in text
    assert "Not read" not in why(tmp_path)


def test_many_records_take_a_limited_memory(tmp_path):
    for rank in range(6):
        write(tmp_path, rank, size=6, calls={"0": {str(i): 1 for i in range(380_000)}})
    text, _, kilobytes = output_of(WHY, tmp_path).rpartition("VmHWM:")
    # `ru_maxrss` of a process contains the memory of its parent.
    assert 1024 * int(kilobytes.split()[0]) < _MEMORY
    assert "Not read, or not to the end: " in text


def test_a_rank_that_waits_for_very_many_collectives(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, **waiting(20_000))
    began = time.process_time()
    assert "Ranks 0, 1 have waited" in why(tmp_path)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("size", [4, 200_000])
def test_the_oldest_of_very_many_waits_count(tmp_path, size):
    """A small record would take all memory if each of its calls had a list of 200,000 ranks."""
    write(tmp_path, 0, **waiting(2_000, size=size, groups={"0": []}))
    record = read(tmp_path, Budget())[0]
    found = find_waits({0: record}, size)
    assert len(found) == (2_000 if size == 4 else 50)
    assert found[0].call == min(record.open, key=lambda call: call.enqueued)
