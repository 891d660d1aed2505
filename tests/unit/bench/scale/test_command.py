"""`hvdkit bench scale`: its files, options and errors."""

import csv
import json
import math

import pytest

from hvdkit import cli
from hvdkit.bench.sizes import parse_ranks
from hvdkit.errors import UsageError

MACHINE = ["--model", "resnet50", "--backward-ms", "170", "--bandwidth", "25Gbit/s"]


def scale(*arguments):
    return cli.main(["bench", "scale", *map(str, arguments)])


def result(benchmark, conditions, rows):
    content = {"format": 1, "benchmark": benchmark, "conditions": conditions, "rows": rows}
    return content | {"expected": 1, "unit": "results", "done": 1, "complete": True}


def allreduce_row(size, seconds, wire="none", variant="hvdkit-gloo"):
    row = {"variant": variant, "dtype": "float32", "op": "sum", "wire": wire, "wrong": 0}
    return row | {"bytes": size, "turns": [[seconds, seconds], [seconds]]}


def write(path, content):
    path.write_text(json.dumps(content))
    return path


LATENCY, BANDWIDTH, OVERHEAD = 30e-6, 1e9, 8e-4


def allreduces(path, ranks, ranks_per_host=1, bandwidth=BANDWIDTH, encoding=0.0):
    """Write a file of exact times of a ring between hosts."""
    hops = 2 * (ranks // ranks_per_host - 1) or 2 * (ranks - 1)
    ring = hops // 2 + 1
    rows = []
    for size in (1024, 1 << 20, 1 << 22, 1 << 24):
        for wire, share in (("none", 1.0), ("fp16", 0.5)):
            seconds = OVERHEAD + hops * (LATENCY + size * share / ring / bandwidth)
            rows.append(allreduce_row(size, seconds + (wire == "fp16") * encoding * size, wire))
    conditions = {"ranks": ranks, "ranks_per_host": ranks_per_host}
    return write(path, result("allreduce", conditions, rows))


def step_row(variant, seconds, ranks, optimizer, wire, **further):
    row = {"model": "resnet50", "part": "step", "variant": variant, "ranks": ranks}
    row |= {"optimizer": optimizer, "wire": wire, "bytes": 102_228_128}
    return row | {"turns": [seconds] * 3} | further


def steps(path, **further):
    rows = [
        step_row("single", 0.3, 1, "single", "", **further),
        step_row("alone", 0.33, 2, "alone", "", **further),
        step_row("hvdkit-gloo-fp32", 0.4, 2, "hvdkit", "fp32", **further),
    ]
    return write(path, result("step", {"ranks": 2, "ranks_per_host": 1}, rows))


def test_a_machine_that_is_described_by_options(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "svg")}
    outputs = ["--json", files["json"], "--csv", files["csv"], "--plot", files["svg"]]
    further = ["--ranks-per-host", "8", "--wires", "fp32,int8", "--levels", "flat,two-level"]
    assert scale("--ranks", "8..1024", *MACHINE, *further, *outputs) == 0
    content = json.loads(files["json"].read_text())
    rows = {(row["levels"], row["wire"], row["ranks"]): row for row in content["rows"]}
    assert len(rows) == 2 * 2 * 8
    two, flat = (rows[levels, "fp32", 1024] for levels in ("two-level", "flat"))
    # 2,046 steps of a flat ring take 20 us each, for each of 6 buckets.
    assert flat["communication_ms"] > two["communication_ms"] + 6 * 2046 * 0.02 * 0.8
    assert rows["two-level", "int8", 1024]["exposed_ms"] < two["exposed_ms"]
    # Ranks of one host add in float32.
    one_host = [rows["two-level", wire, 8]["communication_ms"] for wire in ("fp32", "int8")]
    assert one_host[0] == one_host[1]
    assert two["hosts"] == 128
    assert two["speedup"] == pytest.approx(1024 * two["efficiency"])
    with files["csv"].open() as stream:
        assert len(list(csv.DictReader(stream))) == len(rows)
    assert files["svg"].stat().st_size > 1000
    printed = capsys.readouterr().out
    for text in content["assumptions"]:
        assert text in " ".join(printed.split())
    for text in ("102.2 MB of float32", "25 Gbit/s, latency 20 us", "not measured", "--jitter"):
        assert text in printed


def test_links_are_fitted_to_files_of_bench_allreduce(tmp_path, capsys):
    files = [allreduces(tmp_path / f"{ranks}.json", ranks, encoding=2e-9) for ranks in (2, 8)]
    both = [argument for path in files for argument in ("--allreduce", path)]
    machine = ["--model", "resnet50", "--backward-ms", "1", "--wires", "fp32,fp16"]
    out = tmp_path / "out.json"
    assert scale("--ranks", "64", *machine, *both, "--json", out) == 0
    printed = capsys.readouterr().out
    assert "Between hosts: 8 Gbit/s, latency 30 us" in printed
    assert "A collective takes 800 us in addition" in printed
    assert "Encoding takes 2 ms for each MB" in printed
    fp32, fp16 = json.loads(out.read_text())["rows"]
    nbytes = 102_228_128
    expected = 6 * (OVERHEAD + 126 * LATENCY) + 126 / 64 * nbytes / BANDWIDTH
    assert fp32["communication_ms"] == pytest.approx(expected * 1e3, rel=1e-3)
    expected += nbytes * (2e-9 - 126 / 128 / BANDWIDTH)
    assert fp16["communication_ms"] == pytest.approx(expected * 1e3, rel=1e-3)


def test_one_number_of_ranks_does_not_tell_latency_from_overhead(tmp_path, capsys):
    path = allreduces(tmp_path / "2.json", 2)
    machine = ["--model", "resnet50", "--backward-ms", "100", "--allreduce", path]
    assert scale("--ranks", "2", *machine) == 0
    printed = capsys.readouterr().out
    # 30 us twice, of which the assumed latency is 20 us.
    assert "latency 20 us" in printed
    assert "takes 820 us in addition" in printed
    assert "All files were measured with rings of 2 ranks" in printed


def test_the_link_within_hosts_is_fitted_to_ranks_of_one_host(tmp_path, capsys):
    here = allreduces(tmp_path / "here.json", 4, 4, bandwidth=5e9)
    machine = [*MACHINE, "--allreduce", here, "--ranks-per-host", "4"]
    assert scale("--ranks", "4,16", *machine) == 0
    assert "Within a host: 40 Gbit/s, latency 0 us. Fitted to" in capsys.readouterr().out
    # Ranks of one host need no link between hosts.
    one_host = [*MACHINE[:4], *machine[len(MACHINE) :]]
    assert scale("--ranks", "2,4", *one_host) == 0
    assert "Between hosts" not in capsys.readouterr().out


def test_steps_of_a_file_are_the_profile_and_are_compared(tmp_path, capsys):
    path, out = steps(tmp_path / "step.json"), tmp_path / "out.json"
    link = ["--bandwidth", "1000Gbit/s", "--latency", "0", "--json", out]
    assert scale("--ranks", "2,4", "--step", path, *link) == 0
    printed = capsys.readouterr().out
    # With a perfect network, a step takes as long as that of ranks without a reduction.
    first = json.loads(out.read_text())["rows"][0]
    assert first["step_ms"] == pytest.approx(330, rel=0.01)
    assert first["efficiency"] == pytest.approx(300 / 330, rel=0.01)
    assert "A step of one rank takes 300 ms" in printed
    measured = next(line for line in printed.splitlines() if "hvdkit-gloo-fp32" in line)
    assert measured.split()[1:] == ["2", f"{first['step_ms']:.1f}", "400.0", "-17%"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the step is not known: give --step FILE, or --model and --backward-ms"),
        (MACHINE[:4], "the link between hosts is not known: give --bandwidth"),
        ([*MACHINE, "--model", "lenet"], "--model has the model 'lenet'; expected one of resnet50"),
        ([*MACHINE, "--bandwidth", "0Gbit/s"], "--bandwidth is '0Gbit/s'"),
        ([*MACHINE, "--host-bandwidth", "7"], "--host-bandwidth is '7'"),
        ([*MACHINE, "--latency", "5"], "--latency is '5'; expected a time with a unit"),
        ([*MACHINE, "--backward-ms", "0"], "--backward-ms is 0: expected more than 0"),
        ([*MACHINE, "--backward-ms", "nan"], "--backward-ms is nan: expected more than 0"),
        ([*MACHINE, "--forward-ms", "-1"], "--forward-ms is -1: expected 0 or more"),
        ([*MACHINE, "--jitter", "2"], "--jitter is 2: expected a share below 1"),
        ([*MACHINE, "--ranks-per-host", "0"], "--ranks-per-host is 0: expected more than 0"),
        (
            [*MACHINE, "--ranks", "12", "--ranks-per-host", "8"],
            "--ranks has 12, which does not fill",
        ),
        ([*MACHINE, "--ranks", "8..4"], "--ranks has the range '8..4'; expected FIRST..LAST"),
        ([*MACHINE, "--wires", "fp8"], "--wires has 'fp8'"),
        ([*MACHINE, "--levels", "tree"], "--levels has 'tree'; expected some of flat, two-level"),
        ([*MACHINE, "--buckets", "one", "--bucket-mb", "4"], "--bucket-mb was given with"),
        ([*MACHINE, "--allreduce", "/gone.json"], "--allreduce /gone.json cannot be read"),
        ([*MACHINE, "--plot", "out.txt"], "--plot is out.txt: expected a name with"),
    ],
)
def test_wrong_arguments_are_status_2(arguments, expected, capsys):
    assert scale(*arguments) == 2
    assert expected in capsys.readouterr().err


NO_SINGLE = result(
    "step",
    {"ranks": 2, "ranks_per_host": 1},
    [step_row("hvdkit-gloo-fp32", 0.4, 2, "hvdkit", "fp32")],
)
OTHER_SIZE = [allreduce_row(size, 1e-3 + size * 1e-9) for size in (1024, 4096)]
FASTER = [allreduce_row(size, 1e-3) for size in (1024, 1 << 22, 1 << 24)]
TWO = {"ranks": 2, "ranks_per_host": 1}


@pytest.mark.parametrize(
    ("option", "content", "expected"),
    [
        ("--step", "", ", or no file of `hvdkit bench`"),
        ("--step", "[1]", ", or no file of `hvdkit bench`"),
        ("--step", result("allreduce", TWO, []), "is of `hvdkit bench allreduce`"),
        ("--step", result("step", TWO, []), "has the models (none)"),
        (
            "--step",
            result("step", TWO, [{"model": "resnet50"}]),
            "is damaged (KeyError: 'variant')",
        ),
        ("--step", result("step", TWO, ["text"]), "is damaged (TypeError"),
        ("--step", NO_SINGLE, "has no whole steps of one rank"),
        ("--allreduce", result("step", TWO, []), "is of `hvdkit bench step`"),
        ("--allreduce", result("allreduce", TWO, []), "has 0 sizes of sums of float32 from 4 MB"),
        ("--allreduce", result("allreduce", TWO, OTHER_SIZE), "has 0 sizes of sums"),
        ("--allreduce", result("allreduce", TWO, FASTER), "hardly grow with the size"),
        ("--allreduce", result("allreduce", {"ranks": 2}, FASTER), "an older hvdkit wrote it"),
        (
            "--allreduce",
            result("allreduce", {"ranks": 3, "ranks_per_host": 2}, FASTER),
            "expected the same number of ranks on each host",
        ),
        (
            "--allreduce",
            result("allreduce", {"ranks": 1, "ranks_per_host": 1}, FASTER),
            "has one rank; expected at least 2",
        ),
        *(
            (option, result(option[2:], TWO | changed, rows), "is damaged (ValueError")
            for option, changed, rows in [
                ("--allreduce", {"ranks_per_host": 0.5}, FASTER),
                ("--allreduce", {"ranks": 10**30}, FASTER),
                ("--allreduce", {}, [allreduce_row(math.inf, 1e-3)]),
                ("--allreduce", {}, [allreduce_row(1024, 1e300)]),
            ]
        ),
        (
            "--step",
            result("step", TWO, [step_row("single", 1, 1, "single", "", bytes=math.inf)]),
            "is damaged (ValueError",
        ),
    ],
)
def test_files_of_another_kind_are_status_2(tmp_path, option, content, expected, capsys):
    path = tmp_path / "run.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    given = ["--bandwidth", "1Gbit/s"] if option == "--step" else MACHINE[:4]
    assert scale(option, path, *given) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert str(path) in error


def test_a_step_of_another_model_or_size(tmp_path, capsys):
    path = steps(tmp_path / "step.json")
    link = ["--bandwidth", "1Gbit/s"]
    assert scale("--step", path, "--model", "vgg16", *link) == 2
    assert "has the models resnet50, not vgg16" in capsys.readouterr().err
    assert scale("--step", path, "--backward-ms", "3", *link) == 2
    assert "--step has the times of the passes" in capsys.readouterr().err
    assert scale("--step", steps(path, bytes=1000), *link) == 2
    assert "has 1000 bytes of gradients of resnet50; expected 102228128" in capsys.readouterr().err
    assert scale("--step", steps(path, part="backward"), *link) == 2
    assert "has no whole steps of one rank" in capsys.readouterr().err


def test_numbers_of_ranks():
    assert parse_ranks("8..64") == [8, 16, 32, 64]
    assert parse_ranks("8..512x4, 24") == [8, 24, 32, 128, 512]
    for text in ("", "0", "a", "8..", "8..64x1", "-8"):
        with pytest.raises(UsageError, match="--ranks (has|is)"):
            parse_ranks(text)
