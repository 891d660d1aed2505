import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.engine import fixes, toolchain
from hvdkit.engine.fixes import Edit, Fix, FixFailed
from tests.engine.conftest import FRAMEWORKS

REPOSITORY = Path(__file__).parents[2]


def test_minimal_fixes_fit_the_sdist_on_their_own(pristine, tmp_path):
    tree = shutil.copytree(pristine, tmp_path / "tree")
    minimal = fixes.select(FRAMEWORKS, "minimal")
    fixes.apply(minimal, tree)
    assert 0 < len(minimal) < len(fixes.select(FRAMEWORKS))


@pytest.mark.parametrize("fix", fixes.FIXES, ids=lambda fix: fix.name)
def test_every_fix_fits_the_sdist_on_its_own(pristine, tmp_path, fix):
    paths = {edit.path for edit in fix.edits}
    for path in paths | set(fix.adds):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copy(pristine / path, tmp_path / path)
    fixes.apply([fix], tmp_path)
    for path in paths:
        assert (tmp_path / path).read_text() != (pristine / path).read_text()


def test_names_are_unique():
    names = [fix.name for fix in fixes.FIXES]
    assert len(names) == len(set(names))


def test_every_proof_that_a_fix_names_exists():
    for fix in fixes.FIXES:
        for file, _, test in re.findall(r"(tests/\S+?\.py)(::(\w+))?", fix.proof):
            text = (REPOSITORY / file).read_text()
            assert not test or f"def {test}(" in text, (fix.name, file, test)


def test_a_text_that_is_missing_names_fix_and_file(tmp_path):
    (tmp_path / "setup.py").write_text("nothing of interest\n")
    fix = Fix("demo", "", "", "", edits=(Edit("setup.py", "zip_safe=False", "zip_safe=True"),))
    with pytest.raises(FixFailed, match=r"fix `demo` does not fit setup.py.*0 times.*instead of 1"):
        fixes.apply([fix], tmp_path)
    assert (tmp_path / "setup.py").read_text() == "nothing of interest\n"


def test_a_text_that_occurs_too_often_is_refused(tmp_path):
    (tmp_path / "a.cc").write_text("x = 1;\nx = 1;\n")
    with pytest.raises(FixFailed, match="2 times"):
        fixes.apply([Fix("demo", "", "", "", edits=(Edit("a.cc", "x = 1;", ""),))], tmp_path)


def test_a_missing_file_names_fix_and_file(tmp_path):
    with pytest.raises(FixFailed, match=r"fix `demo` does not fit gone.cc"):
        fixes.apply([Fix("demo", "", "", "", edits=(Edit("gone.cc", "x", "y"),))], tmp_path)


def test_until_replaces_through_the_end_mark():
    edit = Edit("a", "BEGIN", "new", until="END")
    assert edit.apply("1 BEGIN 2 END 3 END") == "1 new 3 END"
    with pytest.raises(ValueError, match="does not follow"):
        edit.apply("END BEGIN")


def test_a_fix_for_one_framework_is_left_out_where_it_is_not_built():
    only_torch = {fix.name for fix in fixes.select({"torch": "2.13.0"})}
    both = {fix.name for fix in fixes.select(FRAMEWORKS)}
    assert both - only_torch == {
        "tensorflow-without-xla",
        "tensorflow-gpu-stream",
        "tensorflow-in-place",
    }


def dropped_imports(tree):
    """Imports of modules that Python 3.12 or 3.13 dropped, in what an engine runs."""
    gone = {"distutils", "imp", "asyncore", "asynchat", "smtpd", "pipes", "cgi", "telnetlib"}
    found = []
    for room in ("common", "runner", "torch", "tensorflow", "_keras", "keras", "data"):
        for path in (tree / "horovod" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                found += [f"{path.name}: {n}" for n in names if n.split(".")[0] in gone]
    return found


def test_fixed_tree_imports_nothing_that_python_dropped(pristine, fixed):
    assert dropped_imports(pristine) == ["js_run.py: distutils.spawn"]
    assert dropped_imports(fixed) == []
    assert "distutils" not in (fixed / "horovod/torch/CMakeLists.txt").read_text()


def nvcc_flags(tree, bin_folder, architectures):
    return subprocess.run(
        [sys.executable, "-c", "import build_utils; print(*build_utils.get_nvcc_flags())"],
        env=os.environ
        | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(tree / "cmake"),
            "HOROVOD_BUILD_CUDA_CC_LIST": architectures,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_cuda_architectures_may_have_a_suffix(pristine, fixed, tmp_path):
    fake = tmp_path / "nvcc"  # no CUDA here: it is only asked which architectures it knows
    fake.write_text("#!/bin/sh\necho\n")
    fake.chmod(0o755)
    answer = nvcc_flags(fixed, tmp_path, "90a,80")
    assert answer.returncode == 0, answer.stderr
    assert "arch=compute_80,code=sm_80" in answer.stdout
    assert 'code=\\"sm_90a,compute_90a\\"' in answer.stdout
    assert nvcc_flags(pristine, tmp_path, "90a,80").returncode != 0


def setup_arguments(tree):
    """What Horovod's setup.py hands to setuptools for a build."""
    code = (
        "import setuptools, sys, json\n"
        "seen = {}\n"
        "setuptools.setup = lambda **arguments: seen.update(arguments)\n"
        "sys.argv = ['setup.py', 'bdist_wheel']\n"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'))\n"
        "print(json.dumps([seen['setup_requires'], seen.get('package_data')]))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ast.literal_eval(answer.stdout.strip().splitlines()[-1].replace("null", "None"))


def test_fixed_setup_fetches_nothing(pristine, fixed):
    assert "cloudpickle" in setup_arguments(pristine)[0]
    required, data = setup_arguments(fixed)
    assert required == []
    assert data == {"horovod": ["hvdkit_engine.json"]}


def test_gloo_float16_assignment(pristine, fixed, tmp_path):
    """5.96e-8 has the bits 1, and 1.0 is what the number 1 is as a float16."""
    program = tmp_path / "assign.cc"
    program.write_text(
        '#include "gloo/types.h"\n'
        "int main() {\n"
        "  gloo::float16 value;\n"
        "  value.x = 1;\n"
        "  value = gloo::float16(1.0);\n"
        "  std::cout << value << std::endl;\n"
        "}\n"
    )
    answers = []
    for name, tree in (("pristine", pristine), ("fixed", fixed)):
        compiler = [toolchain.find_compiler().path, "-std=c++17", "-w"]
        include = f"-I{tree}/third_party/gloo"
        binary = tmp_path / name
        subprocess.run(
            [*compiler, include, str(program), "-o", str(binary)], timeout=120, check=True
        )
        run = subprocess.run([str(binary)], capture_output=True, text=True, timeout=20, check=True)
        answers.append(float(run.stdout))
    assert answers[0] == pytest.approx(5.96e-8, rel=1e-2)
    assert answers[1] == 1.0
