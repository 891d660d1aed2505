import io

import pytest
from rich.console import Console

from hvdkit.engine import progress


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[ 42%] Building CXX object horovod/x.cc.o\n", 42),
        ("[100%] Built target pytorch\n", 100),
        ("[12/48] Building CXX object horovod/x.cc.o\n", 25),
        ("cd /tmp/[ 42%]\n", None),
        ("running bdist_wheel\n", None),
    ],
)
def test_percent_is_read_from_the_output_of_make_and_ninja(line, expected):
    assert progress.percent(line) == expected


def test_without_a_terminal_there_are_few_plain_lines():
    out = io.StringIO()
    with progress.BuildProgress(Console(file=out), "compiling") as shown:
        for number in [*range(60), 30, *range(31, 101)]:
            shown.update(f"[{number:3}%] Building\n")
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"compiling: {number} %" for number in range(10, 101, 10)
    ]
    assert all(line.endswith("0:00") for line in lines)


def test_on_a_terminal_there_is_a_bar_with_percent_and_time():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with progress.BuildProgress(console, "compiling") as shown:
        shown.update("[ 42%] Building\n")
    assert "42 %" in out.getvalue()
    assert "0:00:00" in out.getvalue()
