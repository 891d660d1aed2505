import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.engine import patches, toolchain
from hvdkit.engine.patches import PatchFailed
from hvdkit.engine.patches.diff import DiffError, blob_hash, parse

REPOSITORY = Path(__file__).parents[3]


def test_minimal_patches_are_the_first_ones_and_fit(pristine, tmp_path):
    tree = shutil.copytree(pristine, tmp_path / "tree")
    minimal = patches.select("minimal")
    assert 0 < len(minimal) < len(patches.series())
    assert minimal == patches.series()[: len(minimal)]
    patches.apply(minimal, tree)


def test_git_applies_the_series_with_the_same_result(pristine, patched, tmp_path):
    tree = shutil.copytree(pristine, tmp_path / "tree")
    added = {path: text for patch in patches.series() for path, text in patch.adds.items()}
    for path, text in added.items():
        (tree / path).write_text(text)
    for file in sorted(Path(patches.__file__).parent.glob("*.patch")):
        apply = ["git", "apply", "--whitespace=nowarn", str(file)]
        subprocess.run(apply, cwd=tree, env=os.environ | {"GIT_DIR": "/"}, timeout=60, check=True)
    changed = {change.path for patch in patches.series() for change in patch.diff} | set(added)
    for path in changed:
        assert (tree / path).read_text() == (patched / path).read_text()


def test_files_are_numbered_without_gaps_and_names_are_unique():
    files = sorted(file.name for file in Path(patches.__file__).parent.glob("*.patch"))
    assert [int(file[:2]) for file in files] == list(range(1, len(files) + 1))
    assert len({patch.name for patch in patches.series()}) == len(files)


@pytest.mark.parametrize("patch", patches.series(), ids=lambda patch: patch.name)
def test_fields_are_complete_and_the_named_tests_exist(patch):
    assert patch.description
    assert patch.origin
    assert patch.test
    for file, _, test in re.findall(r"(tests/\S+?\.py)(::(\w+))?", patch.test):
        text = (REPOSITORY / file).read_text()
        assert not test or f"def {test}(" in text, (file, test)


def test_a_file_that_differs_is_named_and_nothing_is_written(pristine, tmp_path):
    tree = shutil.copytree(pristine, tmp_path / "tree")
    last = patches.series()[-1]
    changed = tree / last.diff[-1].path
    changed.write_text(changed.read_text() + "# one more line\n")
    before = {file: file.read_bytes() for file in tree.rglob("*") if file.is_file()}
    refusal = rf"the patch `\S+` does not fit {last.diff[-1].path}: its git hash"
    with pytest.raises(PatchFailed, match=refusal):
        patches.apply(patches.series(), tree)
    assert before == {file: file.read_bytes() for file in tree.rglob("*") if file.is_file()}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        PatchFailed, match=r"the patch `c\+\+17` does not fit CMakeLists.txt: .*No su"
    ):
        patches.apply(patches.series(), tmp_path)


OLD = "".join(f"{number}\n" for number in range(1, 10))
NEW = OLD.replace("2\n", "two\n").replace("8\n", "8\n8.5\n")
HEADER = "diff --git a/a.cc b/a.cc\nindex {before}..{after} 100644\n--- a/a.cc\n+++ b/a.cc\n"
HUNKS = "@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n@@ -8 +8,2 @@ context\n 8\n+8.5\n"


def diff(before=OLD, after=NEW, hunks=HUNKS):
    return HEADER.format(before=blob_hash(before), after=blob_hash(after)) + hunks


def test_a_diff_is_applied_exactly():
    (change,) = parse(diff())
    assert change.path == "a.cc"
    assert change.apply(OLD) == NEW


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (diff(before="another"), "its git hash is"),
        (diff(after="another"), "the result has the git hash"),
        # Offsets are not searched for.
        (diff(hunks=HUNKS.replace("-1,3", "-2,3")), "line 2 differs"),
        (diff(hunks=HUNKS.replace(" 3\n", " three\n")), "line 1 differs"),
    ],
)
def test_a_diff_that_does_not_fit(text, message):
    (change,) = parse(text)
    with pytest.raises(DiffError, match=message):
        change.apply(OLD)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with"),
        ("noise\n" + diff(), "does not begin with"),
        (diff().replace("b/a.cc", "b/b.cc"), "expected one file"),
        (diff().replace("index", "new file mode 100644\nindex"), "expected one file"),
        (diff(hunks=HUNKS.replace("-1,3", "-1,4")), "malformed hunk"),
        (diff(hunks=HUNKS + "\\ No newline at end of file\n"), "malformed hunk"),
        ("diff --git a/a.cc b/a.cc\n", "expected one file"),
    ],
)
def test_a_malformed_diff(text, message):
    with pytest.raises(DiffError, match=message):
        parse(text)


def test_a_malformed_patch_is_named():
    with pytest.raises(PatchFailed, match="the patch `broken` is malformed: .*Install hvdkit"):
        patches._read("broken", "Description: none\n---\nno diff\n")


def dropped_imports(tree):
    """Return the engine's imports of modules that Python 3.12 or 3.13 removed."""
    gone = {"distutils", "imp", "asyncore", "asynchat", "smtpd", "pipes", "cgi", "telnetlib"}
    found = []
    for folder in ("common", "runner", "torch", "tensorflow", "_keras", "keras", "data"):
        for path in (tree / "horovod" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                found += [f"{path.name}: {n}" for n in names if n.split(".")[0] in gone]
    return found


def test_patched_tree_imports_nothing_that_python_dropped(pristine, patched):
    assert dropped_imports(pristine) == ["js_run.py: distutils.spawn"]
    assert dropped_imports(patched) == []
    assert "distutils" not in (patched / "horovod/torch/CMakeLists.txt").read_text()


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


def test_cuda_architectures_may_have_a_suffix(pristine, patched, tmp_path):
    fake = tmp_path / "nvcc"  # Called only for the list of its architectures.
    fake.write_text("#!/bin/sh\necho\n")
    fake.chmod(0o755)
    answer = nvcc_flags(patched, tmp_path, "90a,80")
    assert answer.returncode == 0, answer.stderr
    assert "arch=compute_80,code=sm_80" in answer.stdout
    assert 'code=\\"sm_90a,compute_90a\\"' in answer.stdout
    assert nvcc_flags(pristine, tmp_path, "90a,80").returncode != 0


def setup_arguments(tree):
    """Return the arguments of setup() in Horovod's setup.py."""
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


def test_patched_setup_fetches_nothing(pristine, patched):
    assert "cloudpickle" in setup_arguments(pristine)[0]
    required, data = setup_arguments(patched)
    assert required == []
    assert data == {"horovod": ["hvdkit_engine.json"]}


def test_gloo_float16_assignment(pristine, patched, tmp_path):
    """The bits of 5.96e-8 are the integer 1, which Gloo compares with the new value 1.0."""
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
    for name, tree in (("pristine", pristine), ("patched", patched)):
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
