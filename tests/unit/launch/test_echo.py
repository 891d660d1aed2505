"""The output that a node's agent shows, in other processes: a test changes descriptors 1 and 2."""

import json

from tests.unit.launch.commands import output_of

_BEGIN = '''
import json, os, sys
from hvdkit.launch.agent.echo import Echo
from hvdkit.launch.control import readers

shown_at, said = os.dup(1), []
readers.say = said.append

def begin(target):
    """Return an `Echo` that writes to `target`."""
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    return Echo()

def report(value):
    os.write(shown_at, json.dumps(value).encode())
'''


def run(script):
    """Run a script after `_BEGIN`. Return what it reports."""
    return json.loads(output_of(_BEGIN + script))


def test_no_stream_writes_within_a_line_of_the_other():
    script = """
source, target = os.pipe()
echo = begin(target)
echo.start(1)
echo.write(0, "stdout", (b"o" * 90 + b"\\n") * 2000)  # the pipe is full
found = os.read(source, 8192)
echo.write(0, "stderr", b"error\\n")
while echo.waiting:
    found += os.read(source, 65536)
    echo.step()
os.set_blocking(source, False)
while len(found) < 2000 * 95 + 10:
    found += os.read(source, 65536)
report(found.decode().splitlines())
"""
    assert run(script) == 2000 * ["[0] " + "o" * 90] + ["[0] error"]


def test_a_full_disk_leads_to_one_warning_in_all_starts():
    script = """
echo = begin(os.open("/dev/full", os.O_WRONLY))
for _ in range(3):
    echo.start(1)
    for stream in ("stdout", "stderr") * 2:
        echo.write(0, stream, b"a line\\n")
report(said)
"""
    (warning,) = run(script)
    assert "No space left on device. The ranks' output to it is not shown any more" in warning
