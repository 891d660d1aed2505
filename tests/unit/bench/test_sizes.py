import pytest

from hvdkit.bench import link
from hvdkit.bench.sizes import parse_sizes, show_size
from hvdkit.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4MB", [4_000_000]),
        ("4MiB, 4M,4m", [4 << 20]),
        ("25MB,1KB", [1000, 25_000_000]),
        ("1KiB..8KiB", [1024, 2048, 4096, 8192]),
        ("1K..100Kx4", [1 << 10, 4 << 10, 16 << 10, 64 << 10]),
        ("8..8", [8]),
        ("1.5KB,100", [100, 1500]),
        ("1KB..1GBx10", [10**n for n in range(3, 10)]),
    ],
)
def test_sizes(text, expected):
    assert parse_sizes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ",", "4XB", "MB", "-1", "0", "1KB..", "..1MB", "1MB..1KB", "1..8x1", "1..8x", "1-8"],
)
def test_other_sizes_are_refused(text):
    with pytest.raises(UsageError, match="--sizes"):
        parse_sizes(text)


def test_sizes_are_shown_in_the_unit_that_fits():
    shown = [show_size(size) for size in (8, 1024, 1000, 64 << 20, 25_000_000, 3 << 30)]
    assert shown == ["8 bytes", "1 KiB", "1 KB", "64 MiB", "25 MB", "3 GiB"]


@pytest.mark.parametrize(
    "text", ["1Gbit/s", "1gbit", "1Gbps", "1000 Mbit/s", "1e", "1GB/s", "0bps"]
)
def test_rates(text):
    if text in ("1e", "1GB/s", "0bps"):
        with pytest.raises(UsageError, match="--link is"):
            link.parse_rate(text, "--link")
    else:
        assert link.parse_rate(text, "--link") == 125e6
