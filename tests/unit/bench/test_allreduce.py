"""`hvdkit bench allreduce` with real ranks."""

import csv
import json
import signal

import pytest

from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.unit.bench.commands import bench, processes, start

GLOO = ("allreduce", "-np", "2", "--variants", "hvdkit-gloo")
RING = ("allreduce", "-np", "2", "--variants", "mpi4py-ring")


@pytest.fixture(autouse=True)
def engine():
    skip_where_unsupported(Configuration("torch", "gloo", 2))


@pytest.fixture
def mpi():
    pytest.importorskip("mpi4py")
    skip_where_unsupported(Configuration("torch", "mpi", 2))


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_a_table_that_users_of_nccl_tests_know(tmp_path, mpi):
    files = ["--json", str(tmp_path / "run.json"), "--csv", str(tmp_path / "run.csv")]
    names = "hvdkit-gloo,mpi4py-ring"
    arguments = ["-np", "2", "--variants", names, "--sizes", "1KiB,100KB", "--turns", "2"]
    arguments += ["--calls", "10"]
    done = bench("allreduce", *arguments, *files)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    measured = [line.split() for line in lines[:4]]
    assert [words[:6] for words in measured] == [
        [size, count, "float32", "sum", "none", name]
        for size, count in (("1024", "256"), ("100000", "25000"))
        for name in names.split(",")
    ]
    assert [words[-1] for words in measured] == ["0"] * 4
    for words in measured:
        least, median, most = map(float, words[6:9])
        assert 0 < least <= median <= most
        # 2(n-1)/n is 1 for two ranks.
        assert words[9] == words[10]
        # The median is rounded to 0.1 microseconds.
        rounding = 0.01 + 0.05 / median
        expected = int(words[0]) / median / 1e3
        assert float(words[9]) == pytest.approx(expected, rel=rounding, abs=0.001)
    with (tmp_path / "run.csv").open() as stream:
        read = list(csv.DictReader(stream))
    assert [(row["size"], row["variant"]) for row in read] == [
        (words[0], words[5]) for words in measured
    ]
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["complete"]
    assert [len(row["turns"]) for row in content["rows"]] == [2] * 4


@pytest.mark.long
def test_results_of_an_earlier_run_are_compared(tmp_path, mpi):
    path = tmp_path / "run.json"
    few = ["--sizes", "1KiB", "--turns", "4", "--calls", "5"]
    assert bench(*RING, *few, "--json", str(path)).returncode == 0
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row["turns"] = [[1e6 * seconds for seconds in calls] for calls in row["turns"]]
    path.write_text(json.dumps(content))
    done = bench(*RING, *few, "--compare", str(path))
    assert done.returncode == 0, done.stderr
    assert "1 of 1 results changed beyond the noise" in done.stdout
    assert "faster" in done.stdout


def is_rank(process):
    return "hvdkit.bench.rank" in process.cmdline()[1:4]


def test_a_rank_that_dies_in_the_middle(tmp_path, mpi):
    path = tmp_path / "run.json"
    with start(
        str(tmp_path),
        *RING,
        "--sizes",
        "1KiB,100MB",
        "--turns",
        "2",
        "--calls",
        "1000",
        "--json",
        str(path),
    ) as job:
        try:
            for line in job.stdout:
                if line.lstrip().startswith("1024"):
                    break
            workers = [
                rank for rank in processes(str(tmp_path)) if is_rank(rank) and rank.children()
            ]
            workers[-1].kill()
            _, error = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 1
    assert "killed by signal 9" in error
    assert f"1 of 2 results were measured; they are in {path}." in error
    assert not json.loads(path.read_text())["complete"]
    assert len(rows_of(path)) == 1
    assert not processes(str(tmp_path))


def test_ctrl_c_keeps_what_was_measured(tmp_path, mpi):
    path = tmp_path / "run.json"
    with start(
        str(tmp_path),
        *RING,
        "--sizes",
        "1KiB,100MB",
        "--turns",
        "2",
        "--calls",
        "1000",
        "--json",
        str(path),
    ) as job:
        try:
            for line in job.stdout:
                if line.lstrip().startswith("1024"):
                    break
            job.send_signal(signal.SIGINT)
            _, error = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 130
    assert "SIGINT; 1 of 2 results were measured; they are in" in error
    assert len(rows_of(path)) == 1
    assert not processes(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sizes", "1KB..2"], "--sizes has the range '1KB..2'"),
        (["--sizes", "900TB"], "GB of memory for 2 ranks of all variants"),
        (["--dtypes", "complex64"], "--dtypes has 'complex64'"),
        (["--ops", "product"], "--ops has 'product'"),
        (["--wires", "int8", "--ops", "max"], "leave nothing to measure"),
        (["--json", "/gone/run.json"], "no file can be written to /gone: No such file"),
        (["--csv", "/"], "--csv is /, which is a folder"),
        (["--plot", "run.bmp"], "--plot is run.bmp: expected a name with"),
        (["--compare", "/gone.json"], "--compare /gone.json cannot be read"),
        (["--turns", "0"], "--turns is 0"),
        (["--calls", "0"], "--calls is 0"),
        (["-np", "0"], "-np is 0"),
        (["-H", "localhost:1", "-np", "2"], "the hosts have 1 slot:"),
        (["--engine", "old"], "--engine is 'old': expected NAME=DIR"),
        (["--stock", "/tmp"], "--stock: there is no Horovod for torch in /tmp"),
        (["--two-hosts", "fast"], "--two-hosts is 'fast'"),
    ],
)
def test_wrong_arguments_are_status_2_before_anything_is_measured(arguments, expected, capsys):
    from hvdkit import cli

    assert cli.main(["bench", *GLOO, *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) <= 2


def test_a_picture_needs_matplotlib(monkeypatch, capsys, tmp_path):
    from hvdkit import cli
    from hvdkit.bench import software

    find = software.importlib.util.find_spec
    monkeypatch.setattr(
        software.importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find(name),
    )
    assert cli.main(["bench", *GLOO, "--plot", str(tmp_path / "run.png")]) == 2
    assert "pip install 'hvdkit[plot]'" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["2", "3"])
def test_all_dtypes_operations_and_wire_formats(tmp_path, mpi, ranks):
    path = tmp_path / "run.json"
    names = "hvdkit-*,flat-gloo,engine-*,torch-gloo,mpi4py*"
    every = [
        "--dtypes",
        "float32,float64,float16,bfloat16,int32,int64",
        "--ops",
        "sum,average,min,max",
    ]
    done = bench(
        "allreduce",
        "-np",
        ranks,
        "--variants",
        names,
        *every,
        "--turns",
        "1",
        "--calls",
        "2",
        "--wires",
        "none,fp16,bf16,int8",
        "--sizes",
        "4,4KB,1MB",
        "--json",
        str(path),
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(path)
    assert not [row for row in rows if row["wrong"]]
    assert {(row["variant"], row["wire"]) for row in rows} >= {
        ("hvdkit-gloo", "int8"),
        ("hvdkit-mpi", "bf16"),
        ("engine-gloo", "fp16"),
        ("torch-gloo", "none"),
        ("mpi4py", "none"),
        ("mpi4py-ring", "none"),
    }


@pytest.mark.long
def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    done = bench(*GLOO, "--sizes", "1KiB..64KiBx4", "--turns", "2", "--plot", str(path))
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
