"""What hvdkit changes in Horovod 0.28.1, as data: one table, and the code that applies it.

A fix is a few exact replacements. Each names the text it looks for and how often that text must
occur, so that a source tree which is not the one we know is an error and never half fixed. Horovod
is Apache-2.0; the short fragments quoted here are there to be found, not to be copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from packaging.requirements import Requirement

from hvdkit.errors import HvdkitError

#: The Horovod that the table below was written for.
HOROVOD_VERSION = "0.28.1"

#: Part of the version of what we build (`0.28.1+hvdkit.N`). Raise it whenever the table changes.
REVISION = 7

_UPSTREAM = "https://github.com/horovod/horovod"

# What Gloo and MPI call the operations of half_arithmetic.h.
_REDUCTIONS_OF_GLOO = (
    ("sum", "HalfSum"),
    ("product", "HalfProduct"),
    ("max", "HalfMaximum"),
    ("min", "HalfMinimum"),
)
_REDUCTIONS_OF_MPI = (
    ("sum", "HalfSum"),
    ("min", "HalfMinimum"),
    ("max", "HalfMaximum"),
    ("prod", "HalfProduct"),
)


class FixFailed(HvdkitError):
    """A fix did not find the text that it replaces."""


@dataclass(frozen=True)
class Edit:
    """Replace the text `find` in the file `path`, which must occur exactly `times` times.

    With `until`, what is replaced goes from `find` (once in the file) to the next `until`.
    """

    path: str
    find: str
    put: str
    times: int = 1
    until: str | None = None

    def apply(self, text: str) -> str:
        """The edited text.

        Raises:
            ValueError: the text to be replaced is not there as often as expected.
        """
        found = text.count(self.find)
        if found != self.times:
            raise ValueError(
                f"{_shown(self.find)} occurs {found} times there instead of {self.times}"
            )
        if self.until is None:
            return text.replace(self.find, self.put)
        before, _, rest = text.partition(self.find)
        _, end, after = rest.partition(self.until)
        if not end:
            raise ValueError(f"{_shown(self.until)} does not follow {_shown(self.find)} there")
        return before + self.put + after


@dataclass(frozen=True)
class Fix:
    """One repair.

    Attributes:
        name: how `--list-fixes`, logs and the built engine call it.
        repairs: what goes wrong without it.
        source: the upstream issue or pull request, or how we came to know.
        proof: the test that fails without it, or why its effect cannot be seen in our tests.
        edits: applied in this order.
        adds: file in Horovod's tree -> file in `hvdkit/engine/sources/`.
        needed_to_build: part of `--fixes minimal`.
        only_for: a requirement such as `tensorflow>=2.20`; without one it is always applied.
    """

    name: str
    repairs: str
    source: str
    proof: str
    edits: tuple[Edit, ...]
    adds: Mapping[str, str] = field(default_factory=dict)
    needed_to_build: bool = False
    only_for: str | None = None

    def applies(self, frameworks: Mapping[str, str]) -> bool:
        """Whether it is for a build against these frameworks (name -> version)."""
        if self.only_for is None:
            return True
        requirement = Requirement(self.only_for)
        version = frameworks.get(requirement.name)
        return version is not None and requirement.specifier.contains(version, prereleases=True)


FIXES: tuple[Fix, ...] = (
    Fix(
        name="c++17",
        repairs="PyTorch >= 2.1 and TensorFlow >= 2.10 need C++17, Horovod asks for C++14",
        source=f"{_UPSTREAM}/pull/3998",
        proof="without it no engine builds",
        needed_to_build=True,
        edits=tuple(
            Edit(path, "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")
            for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
        ),
    ),
    Fix(
        name="cmake-4",
        repairs="CMake 4 refuses Gloo's cmake_minimum_required(VERSION 2.8.12)",
        source="CMake 4.0 release notes, 'Deprecated and Removed Features'",
        proof="without it no engine builds where CMake is 4 or newer",
        needed_to_build=True,
        edits=(
            Edit(
                "third_party/gloo/CMakeLists.txt",
                "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)",
                "cmake_minimum_required(VERSION 3.13 FATAL_ERROR)",
            ),
        ),
    ),
    Fix(
        name="python-without-distutils",
        repairs="Python 3.12 has no distutils: horovodrun dies on import, the torch extension "
        "silently gets no Python include path",
        source="https://peps.python.org/pep-0632/",
        proof="tests/engine/test_fixes.py::test_fixed_tree_imports_nothing_that_python_dropped",
        needed_to_build=True,
        edits=(
            Edit(
                "horovod/torch/CMakeLists.txt",
                "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
                "import sysconfig; print(sysconfig.get_path('include'))",
            ),
            Edit(
                "horovod/runner/js_run.py",
                "from distutils.spawn import find_executable\n",
                "from shutil import which as find_executable\n",
            ),
        ),
    ),
    Fix(
        name="gcc-13-headers",
        repairs="gcc >= 13 no longer brings in <stdexcept>, <string> and <cstdint> by the way",
        source=f"{_UPSTREAM}/pull/3957",
        proof="not seen with gcc 12; g++ 13.3 and 14.2 reject the sources without it and accept "
        "them with it",
        needed_to_build=True,
        edits=(
            Edit(
                "horovod/common/common.h",
                "#include <memory>\n#include <string>\n",
                "#include <cstdint>\n#include <memory>\n#include <stdexcept>\n#include <string>\n",
            ),
            Edit(
                "horovod/common/group_table.h",
                "#include <queue>\n#include <unordered_map>\n",
                "#include <cstdint>\n#include <queue>\n#include <string>\n"
                "#include <unordered_map>\n",
            ),
            Edit(
                "third_party/gloo/gloo/types.h",
                '#include "gloo/common/common.h"\n',
                '#include <cstdint>\n\n#include "gloo/common/common.h"\n',
            ),
        ),
    ),
    Fix(
        name="gcc-14-flatbuffers",
        repairs="gcc >= 14 rejects an assignment to a const member in the bundled flatbuffers",
        source="https://github.com/google/flatbuffers/pull/7227",
        proof="not seen with gcc 12; g++ 14.2 rejects message.cc without it",
        needed_to_build=True,
        edits=(
            Edit(
                "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
                "  const size_type count_;",
                "  size_type count_;",
            ),
        ),
    ),
    Fix(
        name="tensorflow-without-xla",
        repairs="the XLA operations include headers that TensorFlow's wheels do not put on the "
        "include path (highwayhash, LLVM)",
        source=f"{_UPSTREAM}/pull/4314",
        proof="without it no engine builds against TensorFlow 2.20 or newer",
        needed_to_build=True,
        only_for="tensorflow>=2.16",
        edits=(
            Edit(
                "horovod/tensorflow/CMakeLists.txt",
                'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/'
                'xla_mpi_ops.cc")\n',
                "",
            ),
        ),
    ),
    Fix(
        name="tensorflow-gpu-stream",
        repairs="TensorFlow 2.21 no longer exports AsGpuStreamValue: a CUDA build cannot be loaded",
        source="https://github.com/conda-forge/horovod-feedstock (tf21_gpu_stream.patch)",
        proof="CUDA only: no test here has a GPU; the fixed file compiles with HAVE_GPU against "
        "TensorFlow 2.16 to 2.21",
        needed_to_build=True,
        only_for="tensorflow>=2.16",
        edits=(
            # First the calls: the text put in by the second edit holds the old name no more.
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "stream_executor::gpu::AsGpuStreamValue(",
                "HvdkitGpuStream(",
                times=12,
            ),
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "// Forward declaration of AsGpuStreamValue\n",
                "",
                until="} // namespace gpu\n",
            ),
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                '#include "tensorflow/stream_executor/stream.h"\n'
                "#endif // TENSORFLOW_VERSION >= 2011000000\n",
                '#include "tensorflow/stream_executor/stream.h"\n'
                "#endif // TENSORFLOW_VERSION >= 2011000000\n"
                "static GpuStreamHandle HvdkitGpuStream(::stream_executor::Stream* stream) {\n"
                "  return static_cast<GpuStreamHandle>(\n"
                "      stream->platform_specific_handle().stream);\n"
                "}\n",
            ),
        ),
    ),
    Fix(
        name="nccl-from-the-wheel",
        repairs="NVIDIA's NCCL wheel holds libnccl.so.2 and no libnccl.so: CMake does not find it",
        source="measured with nvidia-nccl-cu13",
        proof="CUDA only; `missing: NCCL_LIBRARY` at configure without it",
        needed_to_build=True,
        edits=(
            Edit(
                "cmake/Modules/FindNCCL.cmake",
                'set(NCCL_LIBNAME "nccl")',
                'set(NCCL_LIBNAME "nccl" "libnccl.so.2")',
            ),
            Edit(
                "cmake/Modules/FindNCCL.cmake",
                '            NAMES "nccl"\n',
                '            NAMES "nccl" "libnccl.so.2"\n',
            ),
        ),
    ),
    Fix(
        name="cuda-only-when-it-fits",
        repairs="a CUDA build of PyTorch turns CUDA on whenever any nvcc is there, of another "
        "major version too, even where no GPU operations are asked for",
        source="measured with torch 2.1.2+cu121 beside CUDA 13.0",
        proof="without it no engine builds against a CUDA PyTorch beside an nvcc that does not fit",
        needed_to_build=True,
        edits=(
            Edit(
                "cmake/Modules/FindPytorch.cmake",
                "(torch.version.cuda is not None) and (CUDA_HOME is not None)",
                "(torch.version.cuda is not None) and (CUDA_HOME is not None) and "
                "('HVDKIT_WITHOUT_CUDA' not in __import__('os').environ)",
            ),
        ),
    ),
    Fix(
        name="cuda-standard-17",
        repairs="the CUDA kernels ask for C++11, which CUDA 13's and gcc 14's headers are leaving",
        source=f"{_UPSTREAM}/pull/4313",
        proof="CUDA only",
        needed_to_build=True,
        edits=(
            Edit(
                "horovod/common/ops/cuda/CMakeLists.txt",
                "set(CMAKE_CUDA_STANDARD 11)",
                "set(CMAKE_CUDA_STANDARD 17)",
            ),
        ),
    ),
    Fix(
        name="cuda-architecture-suffixes",
        repairs="HOROVOD_BUILD_CUDA_CC_LIST=90a stops in a ValueError, and the kernels are then "
        "built with no flags at all",
        source="measured; compare conda-forge's use_nvcc_gencode.patch",
        proof="tests/engine/test_fixes.py::test_cuda_architectures_may_have_a_suffix",
        needed_to_build=True,
        edits=(
            Edit(
                "cmake/build_utils.py",
                "[int(x) for x in cc_list_env.split(',')]\n    cc_list = sorted(cc_list)",
                "[x.strip() for x in cc_list_env.split(',')]\n"
                "    cc_list = sorted(cc_list, key=lambda x: (int(str(x).rstrip('af')), str(x)))",
            ),
        ),
    ),
    Fix(
        name="build-offline",
        repairs="setup_requires makes the build fetch packages by itself, past pip's settings",
        source=f"{_UPSTREAM}/issues/4003",
        proof="tests/engine/test_fixes.py::test_fixed_setup_fetches_nothing",
        needed_to_build=True,
        edits=(
            Edit(
                "setup.py",
                "setup_requires=require_list if is_build_action() else [],",
                "setup_requires=[],",
            ),
        ),
    ),
    Fix(
        name="build-record",
        repairs="a wheel does not say what it was built from",
        source="hvdkit",
        proof="tests/engine/test_build.py::test_installed_engine_describes_itself",
        needed_to_build=True,
        edits=(
            Edit(
                "setup.py",
                "      zip_safe=False,\n",
                "      zip_safe=False,\n      package_data={'horovod': ['hvdkit_engine.json']},\n",
            ),
        ),
    ),
    Fix(
        name="mpi-of-the-environment",
        repairs="a wheel finds the MPI inside a Python environment by its absolute path alone, and "
        "so works in no other environment",
        source="hvdkit",
        proof="tests/engine/test_build.py::test_installed_engine_finds_mpi_beside_itself",
        needed_to_build=True,
        edits=(
            Edit(
                "CMakeLists.txt",
                "set(CMAKE_CXX_EXTENSIONS OFF)\n",
                "set(CMAKE_CXX_EXTENSIONS OFF)\nset(CMAKE_BUILD_RPATH $ENV{HVDKIT_BUILD_RPATH})\n",
            ),
        ),
    ),
    Fix(
        name="gloo-process-set-interface",
        repairs="the Gloo contexts of process sets, the global one included, ignore "
        "HOROVOD_GLOO_IFACE and bind to what the hostname resolves to; where that is 127.0.1.1 "
        "(Debian's default), every job on several hosts dies",
        source="measured on two hosts (docs/engine.md)",
        proof="tests/cluster/test_engine_hosts.py::test_process_sets_use_the_chosen_interface",
        edits=(
            Edit(
                "horovod/common/gloo/gloo_context.cc",
                "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n"
                "  device_attr.ai_family = AF_UNSPEC;\n"
                "  auto dev = CreateDevice(device_attr);\n\n"
                "  global_ctx = global_context.ctx;\n",
                "  gloo_iface_ = global_context.gloo_iface_;\n"
                "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n"
                "  device_attr.ai_family = AF_UNSPEC;\n"
                "  auto dev = CreateDevice(device_attr);\n\n"
                "  global_ctx = global_context.ctx;\n",
            ),
        ),
    ),
    Fix(
        name="gloo-mesh-rendezvous",
        repairs="each rank asks the rendezvous for the addresses of all others, mesh by mesh: N² "
        "requests, and values of N addresses sent N times (docs/running.md has figures). With "
        "hvdkit's server it takes two requests per rank and mesh, and strangers are kept out",
        source="measured; gloo/rendezvous/context.cc",
        proof="tests/test_rendezvous.py::test_each_rank_sends_two_requests_per_mesh",
        adds={
            "horovod/common/gloo/mesh_rendezvous.h": "mesh_rendezvous.h",
            "horovod/common/gloo/mesh_context.h": "mesh_context.h",
        },
        edits=(
            Edit(
                "horovod/common/gloo/gloo_context.cc",
                '#include "memory_store.h"\n',
                '#include "memory_store.h"\n#include "mesh_context.h"\n',
            ),
            Edit(
                "horovod/common/gloo/gloo_context.cc",
                "  std::unique_ptr<GlooStore> store;\n",
                '  const char* key = std::getenv("HVDKIT_RENDEZVOUS_KEY");\n'
                "  if (server_addr_env != nullptr && key != nullptr) {\n"
                "    auto mesh = std::make_shared<hvdkit::MeshContext>(rank, size, timeout);\n"
                "    if (mesh->connect(server_addr_env, server_port, key, prefix, dev)) {\n"
                "      gloo::BarrierOptions opts(mesh);\n"
                "      opts.setTimeout(timeout);\n"
                "      gloo::barrier(opts);\n"
                "      return mesh;\n"
                "    }\n"
                "  }\n"
                "  std::unique_ptr<GlooStore> store;\n",
            ),
        ),
    ),
    Fix(
        name="gloo-one-global-mesh",
        repairs="the global process set connects all ranks a second time, though they are "
        "connected: twice the time, the sockets and the ports",
        source="reading GlooContext::InitializeForProcessSet",
        proof="tests/test_rendezvous.py::test_each_rank_sends_two_requests_per_mesh",
        edits=(
            Edit(
                "horovod/common/gloo/gloo_context.cc",
                "  std::vector<int> ranks;\n  if (registered_ranks.empty()) {\n",
                "  if (registered_ranks.empty()) {\n"
                "    // The global process set.\n"
                "    ctx = global_context.ctx;\n"
                "    local_ctx = global_context.local_ctx;\n"
                "    cross_ctx = global_context.cross_ctx;\n"
                "    return;\n"
                "  }\n\n"
                "  std::vector<int> ranks;\n  if (registered_ranks.empty()) {\n",
            ),
        ),
    ),
    Fix(
        name="gloo-process-set-scopes",
        repairs="the ranks with the same local rank in a process set meet under a name that has "
        "that local rank alone; where hosts have different numbers of ranks in the set, two groups "
        "have the same name, and connect with each other's addresses",
        source="measured: 6 ranks on hosts with 2, 2, 1 and 1, set [1, 3, 4, 5]",
        proof="tests/test_rendezvous.py::test_process_sets_on_hosts_of_different_sizes",
        edits=(
            Edit(
                "horovod/common/gloo/gloo_context.cc",
                "                               std::to_string(local_rank) + process_set_suffix,\n",
                "                               std::to_string(local_rank) + process_set_suffix +\n"
                '                               "_" + std::to_string(\n'
                "                                   global_context_cross_ranks.front()),\n",
            ),
        ),
    ),
    Fix(
        name="gloo-failed-start",
        repairs="a rank that cannot connect with the others aborts, with a core dump, instead of "
        "raising in hvd.init()",
        source="reading BackgroundThreadLoop, which starts Gloo outside of its try block",
        proof="tests/test_rendezvous.py::test_a_timeout_raises",
        edits=(
            Edit(
                "horovod/common/operations.cc",
                "void BackgroundThreadLoop(HorovodGlobalState& state) {\n#if HAVE_CCL\n",
                "#if HAVE_GLOO\n"
                "template <typename Step>\n"
                "static bool HvdkitSucceeds(HorovodGlobalState& state, Step step) {\n"
                "  try {\n"
                "    step();\n"
                "    return true;\n"
                "  } catch (const std::exception& ex) {\n"
                '    LOG(ERROR) << "Horovod could not be initialized: " << ex.what();\n'
                "    global_gloo_context.Finalize();\n"
                "    state.initialization_failed = true;\n"
                "    return false;\n"
                "  }\n"
                "}\n"
                "#endif // HAVE_GLOO\n\n"
                "void BackgroundThreadLoop(HorovodGlobalState& state) {\n#if HAVE_CCL\n",
            ),
            Edit(
                "horovod/common/operations.cc",
                "    global_gloo_context.Initialize(ParseGlooIface());\n",
                "    if (!HvdkitSucceeds(\n"
                "            state, [] { global_gloo_context.Initialize(ParseGlooIface()); })) {\n"
                "      return;\n"
                "    }\n",
            ),
            Edit(
                "horovod/common/operations.cc",
                "    state.process_set_table.Initialize(global_gloo_context);\n",
                "    if (!HvdkitSucceeds(state, [&] {\n"
                "          state.process_set_table.Initialize(global_gloo_context);\n"
                "        })) {\n"
                "      return;\n"
                "    }\n",
            ),
            # Where ranks have failed to set up a process set, they do not agree on ending it.
            Edit(
                "horovod/common/operations.cc",
                "    horovod_global.process_set_table.Finalize(global_gloo_context,\n"
                "                                              SHUT_DOWN_ERROR);\n",
                "    try {\n"
                "      horovod_global.process_set_table.Finalize(global_gloo_context,\n"
                "                                                SHUT_DOWN_ERROR);\n"
                "    } catch (const std::exception& ex) {\n"
                '      LOG(ERROR) << "Horovod could not end its process sets: " << ex.what();\n'
                "    }\n",
            ),
            Edit(
                "horovod/common/operations.cc",
                "    // Reset initialization flag\n",
                "    // Reset initialization flag\n"
                "    horovod_global.initialization_failed = false;\n",
            ),
        ),
    ),
    Fix(
        name="gloo-stall-inspection",
        repairs="over Gloo the stall inspector believes that there are no ranks: a job in which "
        "one rank never enters a collective hangs for ever, whatever the stall shutdown time",
        source="measured; GlooController reserves the list of ranks instead of resizing it",
        proof="tests/parallel/torch/test_failures.py::test_a_rank_that_never_comes_ends_the_job",
        edits=(
            Edit(
                "horovod/common/gloo/gloo_controller.cc",
                "global_ranks_.reserve(size_);",
                "global_ranks_.resize(size_);",
            ),
        ),
    ),
    Fix(
        name="horovodrun-open-mpi-5",
        repairs="horovodrun over Open MPI 5 ends at once: its launcher takes the second word of "
        "`-bind-to none` for the program to run",
        source="measured with Open MPI 5.0.11",
        proof="tests/parallel/torch/test_digits.py::test_runs_under_plain_horovodrun",
        edits=(
            Edit(
                "horovod/runner/mpi_run.py",
                "return list(_OMPI_FLAGS), list(_NO_BINDING_ARGS), _OMPI_IMPL",
                "return list(_OMPI_FLAGS), ['--bind-to none', '--map-by slot'], _OMPI_IMPL",
            ),
        ),
    ),
    Fix(
        name="gloo-float16-assignment",
        repairs="assigning a Gloo float16 is skipped when the old bits, read as a number, equal "
        "the new value: 5.96e-8 + 1.0 gives 5.96e-8",
        source="measured; gloo/types.h compares with an integer by mistake",
        proof="tests/engine/test_fixes.py::test_gloo_float16_assignment",
        edits=(
            Edit(
                "third_party/gloo/gloo/types.h",
                "return !(*this == rhs.x);",
                "return !(*this == rhs);",
            ),
        ),
    ),
    Fix(
        name="float16-arithmetic",
        repairs="float16 over Gloo is added element by element in software (3 x slower than "
        "float32); over MPI its vector path needs the whole library built for AVX",
        source="measured (docs/engine.md); Gloo's own kernel behind USE_AVX is in no list of its "
        "sources and needs AVX at build time",
        proof="tests/engine/test_half_arithmetic.py, and tests/parallel/torch/test_engine.py::"
        "test_float16_sum_of_the_smallest_value_and_one",
        adds={
            "horovod/common/half_arithmetic.h": "half_arithmetic.h",
            "third_party/gloo/gloo/half_arithmetic.h": "half_arithmetic.h",
        },
        edits=(
            Edit(
                "third_party/gloo/gloo/math.h",
                '#include "gloo/types.h"\n',
                '#include "gloo/half_arithmetic.h"\n#include "gloo/types.h"\n',
            ),
            Edit(
                "third_party/gloo/gloo/math.h",
                "#if GLOO_USE_AVX\n",
                "".join(
                    "template <>\n"
                    f"inline void {function}<float16>(void* c, const void* a, const void* b, "
                    "size_t n) {\n"
                    f"  hvdkit::half_combine<hvdkit::{operation}>(c, a, b, n);\n"
                    "}\n\n"
                    for function, operation in _REDUCTIONS_OF_GLOO
                ).rstrip("\n")
                + "\n",
                until="#endif\n",
            ),
            Edit(
                "horovod/common/half.h",
                "#if __AVX__ && __F16C__\nbool is_avx_and_f16c();\n#endif\n\n",
                "",
            ),
            Edit(
                "horovod/common/half.cc",
                "#include <algorithm>\n",
                '#include "half_arithmetic.h"\n',
                until="#endif\n",
            ),
            Edit(
                "horovod/common/half.cc",
                "#if __AVX__ && __F16C__\n// Query CPUID",
                "#if HAVE_MPI\n"
                + "\n".join(
                    f"void float16_{function}(void* in, void* inout, int* len, MPI_Datatype*) {{\n"
                    f"  hvdkit::half_combine<hvdkit::{operation}>(inout, inout, in, *len);\n"
                    "}\n"
                    for function, operation in _REDUCTIONS_OF_MPI
                )
                + "#endif\n\n} // namespace common",
                until="} // namespace common",
            ),
            Edit(
                "horovod/common/ops/collective_operations.h",
                "#if __AVX__ && __F16C__\n#include <cpuid.h>\n#include <immintrin.h>\n#endif\n",
                "",
            ),
            Edit(
                "horovod/common/ops/collective_operations.h",
                '#include "../half.h"\n',
                '#include "../half.h"\n#include "../half_arithmetic.h"\n',
            ),
            Edit(
                "horovod/common/ops/collective_operations.h",
                "  int64_t i = 0;\n\n#if __AVX__ && __F16C__\n",
                "  hvdkit::half_scale(output, input, scale_factor, num_elements);\n}\n",
                until="Float2HalfBits(&out_float, output + i);\n  }\n\n}\n",
            ),
            Edit(
                "horovod/common/ops/adasum/adasum.h",
                "#if __AVX__ && __F16C__ && __FMA__\n#include <emmintrin.h>\n"
                "#include <immintrin.h>\n#endif\n",
                '#include "../../half_arithmetic.h"\n',
            ),
            Edit(
                "horovod/common/ops/adasum/adasum.h",
                "#if __AVX__ && __F16C__ && __FMA__\n"
                "    if (horovod_datatype == DataType::HOROVOD_FLOAT16) {\n"
                "      ComputeDotAndNormSqrdsfp16(",
                "    if (horovod_datatype == DataType::HOROVOD_FLOAT16) {\n"
                "      hvdkit::half_dot_and_norms((const uint16_t*)a, (const uint16_t*)b, count,\n"
                "                                 dotProduct, anormsq, bnormsq);\n"
                "    } else\n",
                until="#endif\n",
            ),
            Edit(
                "horovod/common/ops/adasum/adasum.h",
                "#if __AVX__ && __F16C__ && __FMA__\n"
                "    if (horovod_datatype == DataType::HOROVOD_FLOAT16) {\n"
                "      ScaledAddfp16(",
                "    if (horovod_datatype == DataType::HOROVOD_FLOAT16) {\n"
                "      hvdkit::half_scaled_add(count, acoeff, (uint16_t*)a, bcoeff,\n"
                "                              (const uint16_t*)b);\n"
                "    } else\n",
                until="#endif\n",
            ),
            Edit(
                "horovod/common/ops/adasum/adasum.h",
                "#if __AVX__ && __F16C__ && __FMA__\n  inline void ComputeDotAndNormSqrdsfp16(",
                "",
                until="#endif\n",
            ),
        ),
    ),
    Fix(
        name="bfloat16",
        repairs="bfloat16 tensors are refused by every framework, backend and operation",
        source=f"{_UPSTREAM}/pull/4049 (never merged; this is not its code)",
        proof="tests/engine/test_half_arithmetic.py, tests/parallel/torch/test_engine.py::"
        "test_bfloat16_sum_is_exact_where_bfloat16_is and tests/parallel/tensorflow/"
        "test_engine.py::test_bfloat16_in_a_graph; with NCCL compiled and not run",
        adds={
            "horovod/common/half_arithmetic.h": "half_arithmetic.h",
            "horovod/common/ops/cuda/bfloat16_kernels.h": "bfloat16_kernels.h",
        },
        edits=(
            # The message that ranks exchange, and its flatbuffers form.
            Edit(
                "horovod/common/message.h",
                "  HOROVOD_BOOL = 9,\n",
                "  HOROVOD_BOOL = 9,\n  HOROVOD_BFLOAT16 = 10,\n",
            ),
            Edit(
                "horovod/common/message.cc",
                "    case HOROVOD_FLOAT32:\n      static const",
                "    case HOROVOD_BFLOAT16:\n"
                '      static const std::string bfloat16("bfloat16");\n'
                "      return bfloat16;\n"
                "    case HOROVOD_FLOAT32:\n      static const",
            ),
            Edit(
                "horovod/common/message.cc",
                "    case HOROVOD_FLOAT16:\n      return 2;\n",
                "    case HOROVOD_FLOAT16:\n    case HOROVOD_BFLOAT16:\n      return 2;\n",
            ),
            Edit(
                "horovod/common/wire/message_generated.h",
                "  DataType_HOROVOD_BOOL = 9,\n",
                "  DataType_HOROVOD_BOOL = 9,\n  DataType_HOROVOD_BFLOAT16 = 10,\n",
            ),
            Edit(
                "horovod/common/wire/message_generated.h",
                "DataType_MAX = DataType_HOROVOD_BOOL\n",
                "DataType_MAX = DataType_HOROVOD_BFLOAT16\n",
            ),
            Edit(
                "horovod/common/wire/message_generated.h",
                "(&EnumValuesDataType())[10]",
                "(&EnumValuesDataType())[11]",
            ),
            Edit(
                "horovod/common/wire/message_generated.h",
                "    DataType_HOROVOD_BOOL\n",
                "    DataType_HOROVOD_BOOL,\n    DataType_HOROVOD_BFLOAT16\n",
            ),
            Edit(
                "horovod/common/wire/message_generated.h",
                'names[11] = {\n    "HOROVOD_UINT8",',
                'names[12] = {\n    "HOROVOD_UINT8",',
            ),
            Edit(
                "horovod/common/wire/message_generated.h",
                '    "HOROVOD_BOOL",\n',
                '    "HOROVOD_BOOL",\n    "HOROVOD_BFLOAT16",\n',
            ),
            Edit(
                "horovod/common/wire/message_generated.h",
                "IsOutRange(e, DataType_HOROVOD_UINT8, DataType_HOROVOD_BOOL)",
                "IsOutRange(e, DataType_HOROVOD_UINT8, DataType_HOROVOD_BFLOAT16)",
            ),
            # Adasum: refused where a rank hands its tensor in, before the ranks talk about it.
            Edit(
                "horovod/common/operations.cc",
                "  if (reduce_op == ReduceOp::ADASUM) {\n#if HAVE_NCCL && !HAVE_ROCM\n",
                "  if (reduce_op == ReduceOp::ADASUM) {\n"
                "    for (const auto& tensor : tensors) {\n"
                "      if (tensor->dtype() == HOROVOD_BFLOAT16) {\n"
                "        return Status::InvalidArgument(\n"
                '            "Adasum does not support bfloat16: convert the tensor, or use "\n'
                '            "another reduction.");\n'
                "      }\n"
                "    }\n"
                "#if HAVE_NCCL && !HAVE_ROCM\n",
            ),
            # Scaling, on CPUs.
            Edit(
                "horovod/common/ops/collective_operations.cc",
                '#include "../message.h"\n',
                '#include "../half_arithmetic.h"\n#include "../message.h"\n',
            ),
            Edit(
                "horovod/common/ops/collective_operations.cc",
                "  case HOROVOD_FLOAT32:\n    ScaleBufferCPUImpl(",
                "  case HOROVOD_BFLOAT16:\n"
                "    hvdkit::bfloat16_scale((uint16_t*)buffer_data,\n"
                "                           (const uint16_t*)fused_input_data,\n"
                "                           (float)scale_factor, num_elements);\n"
                "    break;\n"
                "  case HOROVOD_FLOAT32:\n    ScaleBufferCPUImpl(",
            ),
            # Gloo has no such type. Its templates need no more than the size and these four.
            Edit(
                "horovod/common/ops/gloo_operations.cc",
                '#include "../global_state.h"\n',
                '#include "../global_state.h"\n'
                '#include "../half_arithmetic.h"\n\n'
                "namespace gloo {\n\n"
                "struct bfloat16 {\n  uint16_t bits;\n};\n\n"
                + "\n".join(
                    "template <>\n"
                    f"void {function}<bfloat16>(void* c, const void* a, const void* b, "
                    "size_t n) {\n"
                    f"  hvdkit::bfloat16_combine<hvdkit::{operation}>(c, a, b, n);\n"
                    "}\n"
                    for function, operation in _REDUCTIONS_OF_GLOO
                )
                + "\n} // namespace gloo\n",
            ),
            Edit(
                "horovod/common/ops/gloo_operations.cc",
                "  case HOROVOD_FLOAT32:\n",
                "  case HOROVOD_BFLOAT16:\n"
                "    return new GlooAlgorithms<gloo::bfloat16>(gloo_context);\n"
                "  case HOROVOD_FLOAT32:\n",
            ),
            Edit(
                "horovod/common/mpi/mpi_context.h",
                "  MPI_Op mpi_float16_prod;\n",
                "  MPI_Op mpi_float16_prod;\n\n"
                "  // MPI custom data type for bfloat16.\n"
                "  MPI_Datatype mpi_bfloat16_t = MPI_DATATYPE_NULL;\n"
                + "".join(
                    f"  MPI_Op mpi_bfloat16_{function} = MPI_OP_NULL;\n"
                    for function, _ in _REDUCTIONS_OF_MPI
                ),
            ),
            Edit(
                "horovod/common/mpi/mpi_context.cc",
                '#include "../half.h"\n',
                '#include "../half.h"\n#include "../half_arithmetic.h"\n',
            ),
            Edit(
                "horovod/common/mpi/mpi_context.cc",
                "  case HOROVOD_FLOAT32:\n",
                "  case HOROVOD_BFLOAT16:\n    return mpi_bfloat16_t;\n  case HOROVOD_FLOAT32:\n",
            ),
            # MPI's own operations do not know the type, and are what these fall to.
            *(
                Edit(
                    "horovod/common/mpi/mpi_context.cc",
                    f"  return dtype == HOROVOD_FLOAT16 ? mpi_float16_{function} : ",
                    f"  if (dtype == HOROVOD_BFLOAT16) {{\n    return mpi_bfloat16_{function};\n"
                    f"  }}\n  return dtype == HOROVOD_FLOAT16 ? mpi_float16_{function} : ",
                )
                for function, _ in _REDUCTIONS_OF_MPI
            ),
            Edit(
                "horovod/common/mpi/mpi_context.cc",
                "void CreateMPILocalAndCrossComm(",
                "".join(
                    f"void bfloat16_{function}(void* in, void* inout, int* len, MPI_Datatype*) {{\n"
                    f"  hvdkit::bfloat16_combine<hvdkit::{operation}>(inout, inout, in, *len);\n"
                    "}\n\n"
                    for function, operation in _REDUCTIONS_OF_MPI
                )
                + "void CreateMPIBfloat16TypeAndOps(MPIContext& context) {\n"
                "  MPI_Type_contiguous(2, MPI_BYTE, &context.mpi_bfloat16_t);\n"
                "  MPI_Type_commit(&context.mpi_bfloat16_t);\n"
                + "".join(
                    f"  MPI_Op_create(&bfloat16_{function}, 1, &context.mpi_bfloat16_{function});\n"
                    for function, _ in _REDUCTIONS_OF_MPI
                )
                + "}\n\nvoid CreateMPILocalAndCrossComm(",
            ),
            Edit(
                "horovod/common/mpi/mpi_context.cc",
                "                             mpi_float16_max, mpi_float16_prod);\n",
                "                             mpi_float16_max, mpi_float16_prod);\n"
                "  CreateMPIBfloat16TypeAndOps(*this);\n",
                times=2,
            ),
            Edit(
                "horovod/common/mpi/mpi_context.cc",
                "  if (mpi_float16_t != MPI_DATATYPE_NULL) {\n",
                "  if (mpi_bfloat16_t != MPI_DATATYPE_NULL) {\n"
                "    MPI_Type_free(&mpi_bfloat16_t);\n"
                "  }\n"
                + "".join(
                    f"  if (mpi_bfloat16_{function} != MPI_OP_NULL) {{\n"
                    f"    MPI_Op_free(&mpi_bfloat16_{function});\n"
                    "  }\n"
                    for function, _ in _REDUCTIONS_OF_MPI
                )
                + "  if (mpi_float16_t != MPI_DATATYPE_NULL) {\n",
            ),
            # NCCL has the type since 2.10, where CUDA's header has it.
            Edit(
                "horovod/common/ops/nccl_operations.cc",
                "  case HOROVOD_FLOAT32:\n",
                "#if HAVE_CUDA && CUDART_VERSION >= 11000 && \\\n"
                "    NCCL_VERSION_CODE >= NCCL_VERSION(2, 10, 0)\n"
                "  case HOROVOD_BFLOAT16:\n"
                "    return ncclBfloat16;\n"
                "#endif\n"
                "  case HOROVOD_FLOAT32:\n",
            ),
            Edit(
                "horovod/common/ops/cuda/cuda_kernels.cu",
                '#include "cuda_kernels.h"\n',
                '#include "cuda_kernels.h"\n#include "bfloat16_kernels.h"\n',
            ),
            Edit(
                "horovod/common/ops/cuda/cuda_kernels.cu",
                "    case HOROVOD_FLOAT32:\n      scale_buffer_k",
                "#if CUDART_VERSION >= 11000\n"
                "    case HOROVOD_BFLOAT16:\n"
                "      scale_bfloat16(fused_input_data, buffer_data, num_elements, scale_factor,\n"
                "                     stream);\n"
                "      break;\n"
                "#endif\n"
                "    case HOROVOD_FLOAT32:\n      scale_buffer_k",
            ),
            Edit(
                "horovod/common/ops/cuda/cuda_kernels.cu",
                "   case HOROVOD_FLOAT32:\n     batched_scaled",
                "#if CUDART_VERSION >= 11000\n"
                "   case HOROVOD_BFLOAT16:\n"
                "     batched_scaled_memcpy_k<__nv_bfloat16, BLOCKS_PER_COPY_D2D_KERNEL>\n"
                "         <<<blocks, threads, 0, stream>>>(params, (float) scale_factor);\n"
                "     break;\n"
                "#endif\n"
                "   case HOROVOD_FLOAT32:\n     batched_scaled",
            ),
            Edit(
                "horovod/torch/adapter_v2.cc",
                "  case common::HOROVOD_FLOAT32:\n",
                "  case common::HOROVOD_BFLOAT16:\n"
                "    return ::torch::kBFloat16;\n"
                "  case common::HOROVOD_FLOAT32:\n",
            ),
            Edit(
                "horovod/torch/adapter_v2.cc",
                "  case ::torch::kFloat:\n",
                "  case ::torch::kBFloat16:\n"
                "    return common::HOROVOD_BFLOAT16;\n"
                "  case ::torch::kFloat:\n",
            ),
            Edit(
                "horovod/torch/mpi_ops_v2.cc",
                '  // join\n  m.def("horovod_torch_join", &DoJoin);\n',
                "".join(
                    f'  m.def("horovod_torch_{operation}_async_torch_BFloat16Tensor",\n'
                    f"        &{function});\n"
                    f"#if HOROVOD_GPU_{switch}\n"
                    f'  m.def("horovod_torch_{operation}_async_torch_cuda_BFloat16Tensor",\n'
                    f"        &{function});\n"
                    "#else\n"
                    f'  m.def("horovod_torch_{operation}_async_torch_cuda_BFloat16Tensor",\n'
                    f"        &{function}CudaOnCPU);\n"
                    "#endif\n\n"
                    for operation, function, switch in (
                        ("allreduce", "DoAllreduce", "ALLREDUCE"),
                        ("grouped_allreduce", "DoGroupedAllreduce", "ALLREDUCE"),
                        ("allgather", "DoAllgather", "ALLGATHER"),
                        ("grouped_allgather", "DoGroupedAllgather", "ALLGATHER"),
                        ("broadcast", "DoBroadcast", "BROADCAST"),
                        ("alltoall", "DoAlltoall", "ALLTOALL"),
                        ("reducescatter", "DoReducescatter", "REDUCESCATTER"),
                        ("grouped_reducescatter", "DoGroupedReducescatter", "REDUCESCATTER"),
                    )
                )
                + '  // join\n  m.def("horovod_torch_join", &DoJoin);\n',
            ),
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "  case common::HOROVOD_FLOAT32:\n",
                "  case common::HOROVOD_BFLOAT16:\n"
                "    return DT_BFLOAT16;\n"
                "  case common::HOROVOD_FLOAT32:\n",
            ),
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "  case DT_FLOAT:\n",
                "  case DT_BFLOAT16:\n    return common::HOROVOD_BFLOAT16;\n  case DT_FLOAT:\n",
            ),
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "int64, float16, float32, float64",
                "int64, bfloat16, float16, float32, float64",
                times=9,
            ),
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "        PROCESS_CASE(DT_FLOAT, float)\n",
                "        PROCESS_CASE(DT_BFLOAT16, ::tensorflow::bfloat16)\n"
                "        PROCESS_CASE(DT_FLOAT, float)\n",
            ),
            Edit(
                "horovod/tensorflow/xla_mpi_ops.cc",
                "  case ::xla::F32:\n",
                "  case ::xla::BF16:\n    return common::HOROVOD_BFLOAT16;\n  case ::xla::F32:\n",
            ),
        ),
    ),
    Fix(
        name="portable-wheels",
        repairs="everything is compiled with the build host's -mf16c -mavx -mfma: the wheel dies "
        "with SIGILL on a CPU without them",
        source="measured under an emulated CPU without AVX",
        proof="tests/engine/test_portable.py (long form)",
        edits=(
            Edit(
                "CMakeLists.txt", 'set(ARCH_FLAGS "-mf16c" "-mavx" "-mfma")', 'set(ARCH_FLAGS "")'
            ),
        ),
    ),
    Fix(
        name="gloo-in-place",
        repairs="a single-tensor Gloo allreduce copies its input over its output first, even when "
        "both are the same memory or when it is scaled right after",
        source="measured (docs/engine.md)",
        proof="only time shows it, so no test does: docs/engine.md has the figures",
        edits=(
            Edit(
                "horovod/common/ops/gloo_operations.cc",
                "    buffer_data = (void*)first_entry.output->data();\n"
                "    std::memcpy(buffer_data, first_entry.tensor->data(),\n"
                "                (size_t)first_entry.tensor->size());\n"
                "    fused_input_data = buffer_data;\n",
                "    buffer_data = (void*)first_entry.output->data();\n"
                "    fused_input_data = first_entry.tensor->data();\n"
                "    if (prescale_factor == 1.0 && fused_input_data != buffer_data) {\n"
                "      std::memcpy(buffer_data, fused_input_data,\n"
                "                  (size_t)first_entry.tensor->size());\n"
                "    }\n",
            ),
        ),
    ),
    Fix(
        name="hvdkit-names-never-fused",
        repairs="a bucket that is contiguous already is copied through the fusion buffer, unless "
        "HOROVOD_FUSION_THRESHOLD=0 takes fusion from the user's own tensors too",
        source="hvdkit: tensors whose names begin with `hvdkit.` are buckets",
        proof="tests/parallel/torch/test_engine.py::test_hvdkit_names_are_never_fused",
        adds={"horovod/common/hvdkit_buckets.h": "buckets.h"},
        edits=(
            Edit(
                "horovod/common/controller.cc",
                '#include "global_state.h"\n',
                '#include "global_state.h"\n#include "hvdkit_buckets.h"\n',
            ),
            Edit(
                "horovod/common/controller.cc",
                "void Controller::FuseResponses(std::deque<Response>& responses,\n",
                "static bool HvdkitNeverFused(const Response& response) {\n"
                "  return hvdkit::is_bucket(response.tensor_names()[0]);\n"
                "}\n\n"
                "void Controller::FuseResponses(std::deque<Response>& responses,\n",
            ),
            Edit(
                "horovod/common/controller.cc",
                "      while (!responses.empty()) {\n"
                "        auto& new_response = responses.front();\n",
                "      while (!responses.empty() && !HvdkitNeverFused(response)) {\n"
                "        auto& new_response = responses.front();\n",
                times=1,
            ),
            Edit(
                "horovod/common/controller.cc",
                "        if (response.response_type() == new_response.response_type() &&\n",
                "        if (!HvdkitNeverFused(new_response) &&\n"
                "            response.response_type() == new_response.response_type() &&\n",
                times=2,
            ),
        ),
    ),
    Fix(
        name="idle-cycles",
        repairs="a rank that waits for nothing wakes up every millisecond all the same, and talks "
        "to all others: several percent of a core, taken from the backward pass",
        source="measured (docs/engine.md)",
        proof="tests/parallel/torch/test_engine.py::test_an_idle_rank_wakes_up_seldom",
        adds={"horovod/common/hvdkit_buckets.h": "buckets.h"},
        edits=(
            Edit(
                "horovod/common/tensor_queue.h",
                '#include "common.h"\n',
                '#include "common.h"\n#include "hvdkit_buckets.h"\n',
            ),
            Edit(
                "horovod/common/tensor_queue.h",
                "class TensorQueue {\npublic:\n",
                "class TensorQueue {\npublic:\n"
                "  bool HvdkitIsIdle() const {\n"
                "    std::lock_guard<std::mutex> guard(mutex_);\n"
                "    return tensor_table_.empty() && message_queue_.empty();\n"
                "  }\n\n",
            ),
            Edit(
                "horovod/common/tensor_queue.cc",
                "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
                "  hvdkit::Arrivals::instance().notify(message.tensor_name());\n"
                "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
            ),
            Edit(
                "horovod/common/tensor_queue.cc",
                "    message_queue_.push(std::move(messages[i]));\n",
                "    hvdkit::Arrivals::instance().notify(messages[i].tensor_name());\n"
                "    message_queue_.push(std::move(messages[i]));\n",
            ),
            Edit(
                "horovod/common/operations.cc",
                "bool RunLoopOnce(HorovodGlobalState& state) {\n",
                "// Cycles are negotiations that all ranks take part in. A rank that waits for no\n"
                "// tensor lets some of them pass, until it gets one: a bucket is attended to\n"
                "// at once, other tensors in the next cycle, so that they can be fused.\n"
                "static void HvdkitSleepWhileIdle(HorovodGlobalState& state) {\n"
                "  auto& arrivals = hvdkit::Arrivals::instance();\n"
                "  arrivals.forget();\n"
                "  auto ids = state.process_set_table.Ids();\n"
                "  for (auto id : ids) {\n"
                "    if (!state.process_set_table.Get(id).tensor_queue.HvdkitIsIdle()) {\n"
                "      return;\n"
                "    }\n"
                "  }\n"
                "  auto cycle = std::chrono::microseconds(\n"
                "      long(state.parameter_manager.CycleTimeMs() * 1000.));\n"
                "  std::chrono::microseconds longest = 5 * cycle;\n"
                "  // A collective of the global process set waits for this rank's own tensor\n"
                "  // anyway; one of a set without this rank would wait for nothing.\n"
                "  if (ids.size() == 1) {\n"
                "    longest = std::max<std::chrono::microseconds>(\n"
                "        longest, std::chrono::milliseconds(20));\n"
                "  }\n"
                "  arrivals.await_tensor(state.last_cycle_start, cycle,\n"
                "                        state.last_cycle_start + longest);\n"
                "}\n\n"
                "bool RunLoopOnce(HorovodGlobalState& state) {\n",
            ),
            Edit(
                "horovod/common/operations.cc",
                "    std::this_thread::sleep_for(sleep_duration);\n  }\n  state.last_cycle_start",
                "    std::this_thread::sleep_for(sleep_duration);\n  }\n"
                "  HvdkitSleepWhileIdle(state);\n  state.last_cycle_start",
            ),
        ),
    ),
    Fix(
        name="gloo-broken-connections",
        repairs="when a connection breaks, Gloo tells those who wait for a buffer, save for one of "
        "which a part is sent or received: a rank whose peer has died sleeps until its timeout",
        source="measured; Pair::signalException goes through the lists of waiting buffers alone",
        proof="without it the job ends late now and then, not each time, in "
        "test_a_rank_that_dies_amid_buckets_ends_the_job",
        edits=(
            Edit(
                "third_party/gloo/gloo/transport/tcp/pair.cc",
                "      op.buf->signalException(ex);\n    }\n  }\n\n"
                "  // Loop through pending send operations.\n",
                "      op.buf->signalException(ex);\n    }\n"
                "    NonOwningPtr<UnboundBuffer> sent(op.ubuf);\n"
                "    if (sent) {\n"
                "      sent->signalException(ex);\n"
                "    }\n"
                "  }\n"
                "  NonOwningPtr<UnboundBuffer> received(rx_.ubuf);\n"
                "  if (received) {\n"
                "    received->signalException(ex);\n"
                "  }\n\n"
                "  // Loop through pending send operations.\n",
            ),
        ),
    ),
    Fix(
        name="gloo-loop-yields",
        repairs="Gloo's thread spins while another one holds a connection that it has news for, "
        "and so keeps that one from the core that it needs to let go",
        source="measured (docs/engine.md)",
        proof="only CPU time shows it, so no test does: docs/engine.md has the figures",
        edits=(
            Edit(
                "third_party/gloo/gloo/transport/tcp/pair.cc",
                "  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n",
                "  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n"
                "  if (!lock) {\n"
                "    std::this_thread::yield();\n",
            ),
            Edit(
                "third_party/gloo/gloo/transport/tcp/pair.cc",
                "#include <sstream>\n",
                "#include <sstream>\n#include <thread>\n",
            ),
        ),
    ),
    Fix(
        name="torch-wait-asleep",
        repairs="a PyTorch thread that waits for a collective spins, and takes the core from the "
        "threads that it waits for",
        source="measured (docs/engine.md)",
        proof="tests/parallel/torch/test_engine.py::test_a_rank_that_waits_leaves_its_core_alone",
        edits=(
            Edit(
                "horovod/torch/handle_manager.h",
                "#include <atomic>\n",
                "#include <atomic>\n#include <condition_variable>\n",
            ),
            Edit(
                "horovod/torch/handle_manager.h",
                "  bool PollHandle(int handle);\n",
                "  bool PollHandle(int handle);\n  void WaitForHandle(int handle);\n",
            ),
            Edit(
                "horovod/torch/handle_manager.h",
                "  std::mutex mutex_;\n",
                "  std::mutex mutex_;\n  std::condition_variable changed_;\n",
            ),
            Edit(
                "horovod/torch/handle_manager.cc",
                "  results_[handle] = std::make_shared<Status>(status);\n}\n",
                "  results_[handle] = std::make_shared<Status>(status);\n"
                "  changed_.notify_all();\n}\n\n"
                "void HandleManager::WaitForHandle(int handle) {\n"
                "  std::unique_lock<std::mutex> lock(mutex_);\n"
                "  changed_.wait(lock, [&] {\n"
                "    auto result = results_.find(handle);\n"
                "    return result == results_.end() || result->second != nullptr;\n"
                "  });\n}\n",
            ),
            Edit(
                "horovod/torch/handle_manager.cc",
                "  results_.clear();\n",
                "  results_.clear();\n  changed_.notify_all();\n",
            ),
            Edit(
                "horovod/torch/mpi_ops_v2.cc",
                "      std::this_thread::yield();\n",
                "      handle_manager.WaitForHandle(handle);\n",
            ),
        ),
    ),
    Fix(
        name="torch-calls-without-gil",
        repairs="a PyTorch rank that starts a collective while another rank shuts Horovod down "
        "hangs for ever: it holds Python's lock (GIL) and waits for a lock of Horovod's, whose "
        "thread waits for the GIL to free a tensor",
        source="measured; stacks of both threads: ProcessSetTable::Contains, FinalizeTensorQueue",
        proof="tests/parallel/torch/test_failures.py"
        "::test_a_rank_that_starts_collectives_while_another_shuts_down",
        edits=(
            Edit(
                "horovod/torch/mpi_ops_v2.cc",
                "PYBIND11_MODULE(mpi_lib_v2, m) {\n",
                "namespace {\n"
                "// Defines functions that run without the GIL: Horovod's thread may hold a lock\n"
                "// that they need, and wait for the GIL.\n"
                "struct WithoutGil {\n"
                "  py::module_& module;\n"
                "  template <typename Function>\n"
                "  void def(const char* name, Function function) {\n"
                "    module.def(name, function, py::call_guard<py::gil_scoped_release>());\n"
                "  }\n"
                "};\n"
                "} // namespace\n\n"
                "PYBIND11_MODULE(mpi_lib_v2, module) {\n"
                "  WithoutGil m{module};\n",
            ),
            Edit(
                "horovod/torch/mpi_ops_v2.cc",
                "      py::gil_scoped_release release_python_gil;\n",
                "",
            ),
        ),
    ),
    Fix(
        name="python-thread-state",
        repairs="a process that is forked while Horovod frees a tensor of PyTorch hangs before it "
        "runs, such as a DataLoader's worker at the start of an epoch (Python 3.11)",
        source="measured: 6 of 2,000 forks; https://github.com/python/cpython/issues/112275",
        proof="tests/parallel/torch/test_engine.py::test_horovods_thread_keeps_its_python_state",
        adds={"horovod/common/python_thread.h": "python_thread.h"},
        edits=(
            Edit(
                "horovod/common/operations.cc",
                '#include "parameter_manager.h"\n#include "timeline.h"\n',
                '#include "parameter_manager.h"\n#include "python_thread.h"\n'
                '#include "timeline.h"\n',
            ),
            Edit(
                "horovod/common/operations.cc",
                "void BackgroundThreadLoop(HorovodGlobalState& state) {\n#if HAVE_CCL\n",
                "void BackgroundThreadLoop(HorovodGlobalState& state) {\n"
                "  hvdkit::keep_python_thread_state();\n#if HAVE_CCL\n",
            ),
            # These end collectives on GPUs.
            Edit(
                "horovod/common/thread_pool.cc",
                '#include "thread_pool.h"\n',
                '#include "thread_pool.h"\n\n#include "python_thread.h"\n',
            ),
            Edit(
                "horovod/common/thread_pool.cc",
                "void ThreadPool::loop() {\n",
                "void ThreadPool::loop() {\n  hvdkit::keep_python_thread_state();\n",
            ),
        ),
    ),
    Fix(
        name="join-beside-cached-gathers",
        repairs="a rank that has called join takes part in collectives which it cannot, once the "
        "others have them in their cache: an allgather then corrupts memory on every rank",
        source="measured; ComputeResponseList counts every cached response of a joined rank",
        proof="tests/parallel/torch/test_failures.py::test_a_gather_while_a_rank_has_joined",
        edits=(
            Edit(
                "horovod/common/controller.cc",
                "    for (uint32_t bit : response_cache_.list_all_bits()) {\n"
                "      cache_coordinator.record_hit(bit);\n    }\n",
                "    for (uint32_t bit : response_cache_.list_all_bits()) {\n"
                "      auto type = response_cache_.peek_response(bit).response_type();\n"
                "      if (type == Response::ALLREDUCE || type == Response::ADASUM) {\n"
                "        cache_coordinator.record_hit(bit);\n"
                "      } else {\n"
                "        // Negotiated anew, which ends in Horovod's own error.\n"
                "        cache_coordinator.record_invalid_bit(bit);\n"
                "        cache_coordinator.set_uncached_in_queue(true);\n"
                "      }\n    }\n",
            ),
        ),
    ),
    Fix(
        name="join-devices",
        repairs="once a rank has called join, the list of devices is shorter than the ranks that "
        "index it: memory outside of it is written. The zeros of a joined rank are all on one "
        "device, so that collectives on CPUs and on GPUs cannot both go on",
        source="found by reading ConstructResponse and GetTensorEntriesFromResponse",
        proof="tests/parallel/torch/test_failures.py::test_the_last_rank_goes_on_alone (under "
        "valgrind or with a checked std::vector; the GPU part: scripts/check_gpu collectives)",
        edits=(
            Edit(
                "horovod/common/controller.cc",
                "  std::vector<int32_t> devices(requests.size());\n"
                "  for (auto& request : requests) {\n"
                "    devices[request.request_rank()] = request.device();\n  }\n",
                "  // A rank that has joined sent no request. The list is then "
                "shorter than size_,\n"
                "  // which also keeps the response out of the cache.\n"
                "  std::vector<int32_t> devices(requests.size());\n"
                "  for (size_t i = 0; i < requests.size(); ++i) {\n"
                "    auto place = joined_size > 0 ? i : (size_t)requests[i].request_rank();\n"
                "    devices[place] = requests[i].device();\n  }\n",
            ),
            Edit(
                "horovod/common/ops/nccl_operations.cc",
                "nccl_device_map.push_back(response.devices()[rank]);",
                "nccl_device_map.push_back(\n"
                "        response.devices()[rank % response.devices().size()]);",
            ),
            Edit(
                "horovod/common/ops/nccl_operations.cc",
                "response.devices()[process_set.controller->GetCrossRank()]",
                "response.devices()[process_set.controller->GetCrossRank() %\n"
                "                          response.devices().size()]",
            ),
            Edit(
                "horovod/common/tensor_queue.cc",
                "        TensorTableEntry entry;\n"
                "        join_iter->second.context->AllocateZeros(response.tensor_sizes()[i],\n"
                "                                                 response.tensor_type(),\n"
                "                                                 &(entry.tensor));\n",
                "        // The tensors of a response are all on CPUs or all on GPUs.\n"
                "        int device = response.devices()[0] == CPU_DEVICE_ID\n"
                "                         ? CPU_DEVICE_ID\n"
                "                         : join_iter->second.device;\n"
                "        TensorTableEntry entry;\n"
                "        join_iter->second.context->AllocateZeros(\n"
                "            response.tensor_sizes()[i], response.tensor_type(), device,\n"
                "            &(entry.tensor));\n",
            ),
            Edit(
                "horovod/common/tensor_queue.cc",
                "        entry.device = join_iter->second.device;\n",
                "        entry.device = device;\n",
            ),
            Edit(
                "horovod/common/common.h",
                "  virtual Status AllocateZeros(int64_t num_elements, DataType dtype,\n",
                "  virtual Status AllocateZeros(int64_t num_elements, DataType dtype, "
                "int device,\n",
            ),
            Edit(
                "horovod/torch/adapter_v2.h",
                "  Status AllocateZeros(int64_t num_elements, DataType dtype,\n",
                "  Status AllocateZeros(int64_t num_elements, DataType dtype, int device,\n",
            ),
            Edit(
                "horovod/torch/adapter_v2.cc",
                "TorchOpContext::AllocateZeros(int64_t num_elements, DataType dtype,\n",
                "TorchOpContext::AllocateZeros(int64_t num_elements, DataType dtype, int device,\n",
            ),
            Edit(
                "horovod/torch/adapter_v2.cc",
                "  with_device device_context(device_);\n"
                "  auto torch_data_type = GetTorchDataType(dtype);\n"
                "  ::torch::DeviceType device_type =\n"
                "      device_ != CPU_DEVICE_ID ? ::torch::kCUDA : ::torch::kCPU;\n"
                "  ::torch::Tensor zero_tensor = ",
                "  with_device device_context(device);\n"
                "  auto torch_data_type = GetTorchDataType(dtype);\n"
                "  ::torch::DeviceType device_type =\n"
                "      device != CPU_DEVICE_ID ? ::torch::kCUDA : ::torch::kCPU;\n"
                "  ::torch::Tensor zero_tensor = ",
            ),
            Edit(
                "horovod/torch/adapter_v2.cc",
                "  if (device_ != CPU_DEVICE_ID) {\n"
                "    // On GPU allocation is asynchronous, we need to wait for it to\n"
                "    // complete.\n"
                "    auto stream = c10::cuda::getCurrentCUDAStream(device_);\n"
                "    C10_CUDA_CHECK(cudaStreamSynchronize(stream));\n  }\n"
                "#endif\n  return Status::OK();\n}\n\nFramework",
                "  if (device != CPU_DEVICE_ID) {\n"
                "    // On GPU allocation is asynchronous, we need to wait for it to\n"
                "    // complete.\n"
                "    auto stream = c10::cuda::getCurrentCUDAStream(device);\n"
                "    C10_CUDA_CHECK(cudaStreamSynchronize(stream));\n  }\n"
                "#endif\n  return Status::OK();\n}\n\nFramework",
            ),
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "  AllocateZeros(int64_t num_elements, common::DataType dtype,\n"
                "                std::shared_ptr<common::Tensor>* tensor) override;\n",
                "  AllocateZeros(int64_t num_elements, common::DataType dtype, int device,\n"
                "                std::shared_ptr<common::Tensor>* tensor) override;\n",
            ),
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "TFOpContext::AllocateZeros(int64_t num_elements, common::DataType dtype,\n",
                "TFOpContext::AllocateZeros(int64_t num_elements, common::DataType dtype,\n"
                "                           int device,\n"
                "                           std::shared_ptr<common::Tensor>* tensor) {\n"
                "  std::shared_ptr<Tensor> zero_tensor = std::make_shared<Tensor>();\n"
                "  auto tf_data_type = GetTFDataType(dtype);\n"
                "  ::tensorflow::AllocatorAttributes tf_attribute;\n"
                "  int device_ = device;\n",
                until="  int device_ = GetDeviceID(context_);\n",
            ),
            Edit(
                "horovod/tensorflow/xla_mpi_ops.cc",
                "AllocateZeros(int64_t num_elements, common::DataType dtype,\n",
                "AllocateZeros(int64_t num_elements, common::DataType dtype, int device,\n",
                times=2,
            ),
        ),
    ),
    Fix(
        name="nccl-one-gpu-per-rank",
        repairs="where two ranks use the same GPU, NCCL's whole answer is `invalid usage`",
        source="NCCL refuses such a communicator (init.cc, 'Duplicate GPU detected')",
        proof="scripts/check_gpu collectives (two ranks on one GPU)",
        edits=(
            Edit(
                "horovod/common/ops/nccl_operations.cc",
                '    nccl_context_->ErrorCheck("ncclCommInitRank", nccl_result, nccl_comm);\n',
                "#if HAVE_CUDA\n"
                "    if (nccl_result == ncclInvalidUsage) {\n"
                "      int gpu = -1;\n"
                '      char bus[32] = "unknown";\n'
                "      cudaGetDevice(&gpu);\n"
                "      cudaDeviceGetPCIBusId(bus, sizeof(bus), gpu);\n"
                "      throw std::logic_error(\n"
                '          "NCCL could not connect rank " + std::to_string(nccl_rank) +\n'
                '          " of " + std::to_string(nccl_size) + ", which uses GPU " +\n'
                '          std::to_string(gpu) + " (PCI " + bus +\n'
                '          "): NCCL refuses two ranks on one GPU. Start at most as '
                'many ranks per "\n'
                '          "host as it has GPUs, and leave the choice of the GPU to '
                'hvd.init() or "\n'
                '          "set it by hvd.local_rank(). To share a GPU, build the engine that "\n'
                '          "reduces through host memory: hvdkit build --gpu none");\n'
                "    }\n"
                "#endif\n"
                '    nccl_context_->ErrorCheck("ncclCommInitRank", nccl_result, nccl_comm);\n',
            ),
        ),
    ),
    Fix(
        name="torch-named-backward",
        repairs="the backward pass of a named allreduce, allgather, ... is a collective without a "
        "name, numbered by each rank for itself: it hangs once ranks have made different numbers "
        "of calls, and refuses gradients that are not contiguous",
        source="measured",
        proof="tests/parallel/torch/test_differentiation.py",
        edits=(
            Edit(
                "horovod/torch/mpi_ops.py",
                "class HorovodAllreduce(torch.autograd.Function):\n",
                "def _hvdkit_name(ctx, part):\n"
                "    return f'{ctx.hvdkit_name}.{part}' if ctx.hvdkit_name else None\n\n\n"
                "class HorovodAllreduce(torch.autograd.Function):\n",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "        ctx.process_set = process_set\n",
                "        ctx.process_set = process_set\n        ctx.hvdkit_name = name\n",
                times=8,
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "allreduce(grad_output, average=ctx.average, op=ctx.op,\n",
                "allreduce(grad_output.contiguous(), average=ctx.average, op=ctx.op,\n"
                "                         name=_hvdkit_name(ctx, 'grad'),\n",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "grouped_allreduce(list(grad_output), average=ctx.average, op=ctx.op,\n",
                "grouped_allreduce([g.contiguous() for g in grad_output],\n"
                "                                         average=ctx.average, op=ctx.op,\n"
                "                                         name=_hvdkit_name(ctx, 'grad'),\n",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "allreduce(grad_output, average=True, process_set=ctx.process_set)",
                "allreduce(grad_output.contiguous(), average=True,\n"
                "                                 name=_hvdkit_name(ctx, 'grad'),\n"
                "                                 process_set=ctx.process_set)",
                times=2,
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "grouped_allreduce(list(grad_output), average=True, process_set=ctx.process_set)",
                "grouped_allreduce([g.contiguous() for g in grad_output], average=True,\n"
                "                                         name=_hvdkit_name(ctx, 'grad'),\n"
                "                                         process_set=ctx.process_set)",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "allgather(dim_t, process_set=ctx.process_set)",
                "allgather(dim_t, name=_hvdkit_name(ctx, 'grad.sizes'),\n"
                "                        process_set=ctx.process_set)",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "grouped_allgather(dim_ts, process_set=ctx.process_set)",
                "grouped_allgather(dim_ts, name=_hvdkit_name(ctx, 'grad.sizes'),\n"
                "                                          process_set=ctx.process_set)",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "alltoall(grad_output, splits=ctx.recvsplits,\n",
                "alltoall(grad_output.contiguous(), splits=ctx.recvsplits,\n"
                "                                      name=_hvdkit_name(ctx, 'grad'),\n",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "        return allgather(grad_output, process_set=ctx.process_set), ",
                "        return allgather(grad_output.contiguous(),\n"
                "                         name=_hvdkit_name(ctx, 'grad'),\n"
                "                         process_set=ctx.process_set), ",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "*grouped_allgather(grad_output, process_set=ctx.process_set))",
                "*grouped_allgather([g.contiguous() for g in grad_output],\n"
                "                                   name=_hvdkit_name(ctx, 'grad'),\n"
                "                                   process_set=ctx.process_set))",
            ),
        ),
    ),
    Fix(
        name="torch-unnamed-collectives",
        repairs="collectives without a name are numbered by all that a rank has done, so after an "
        "uneven join() every rank waits under another name",
        source="measured on 2 ranks with batches of different number",
        proof="tests/parallel/torch/test_failures.py::test_unnamed_collectives_after_join",
        edits=(
            Edit(
                "horovod/torch/mpi_ops.py",
                '_NULL = ""\n',
                '_NULL = ""\n\n'
                "# Process set -> collectives without a name that this rank has begun in it.\n"
                "_hvdkit_unnamed = {}\n\n\n"
                "def _hvdkit_name_of(name, process_set):\n"
                "    if name is not None:\n        return name.encode()\n"
                "    number = process_set.process_set_id\n"
                "    count = _hvdkit_unnamed[number] = _hvdkit_unnamed.get(number, 0) + 1\n"
                "    return f'noname.{count}'.encode()\n",
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "name.encode() if name is not None else _NULL",
                "_hvdkit_name_of(name, process_set)",
                times=8,
            ),
            Edit(
                "horovod/torch/mpi_ops.py",
                "    _handle_map[handle] = (None, output)\n\n"
                "    return synchronize(handle).item()\n\n"
                "def barrier",
                "    _handle_map[handle] = (None, output)\n\n"
                "    last = synchronize(handle).item()\n"
                "    # Ranks that joined early have begun fewer.\n"
                "    _hvdkit_unnamed.clear()\n"
                "    return last\n\n"
                "def barrier",
            ),
        ),
    ),
    Fix(
        name="torch-zero-grad",
        repairs="horovod.torch's optimizer refuses zero_grad(set_to_none=…)",
        source=f"{_UPSTREAM}/pull/4026, {_UPSTREAM}/issues/3405",
        proof="tests/parallel/torch/test_engine.py::test_horovods_optimizer_takes_set_to_none",
        edits=(
            Edit(
                "horovod/torch/optimizer.py",
                "    def zero_grad(self):\n",
                "    def zero_grad(self, *args, **kwargs):\n",
                times=2,
            ),
            Edit(
                "horovod/torch/optimizer.py",
                "super(self.__class__, self).zero_grad()",
                "super(self.__class__, self).zero_grad(*args, **kwargs)",
                times=2,
            ),
        ),
    ),
    Fix(
        name="tensorflow-in-place",
        repairs="an allreduce in a TensorFlow graph has memory of its own for its result, and "
        "copies the input there first, although nothing else has use of the input",
        source="measured (docs/benchmarks.md)",
        proof="only seen as time and memory; that it does no harm, in "
        "test_an_input_that_is_used_elsewhere_is_left_alone",
        only_for="tensorflow>=2.16",
        edits=(
            Edit(
                "horovod/tensorflow/mpi_ops.cc",
                "    auto tensor = context->input(0);\n"
                "    horovod::common::ReduceOp reduce_op = "
                "static_cast<horovod::common::ReduceOp>(reduce_op_);\n"
                "    Tensor* output;\n"
                "    OP_REQUIRES_OK_ASYNC(\n"
                "        context, context->allocate_output(0, tensor.shape(), &output), done);\n",
                "    horovod::common::ReduceOp reduce_op = "
                "static_cast<horovod::common::ReduceOp>(reduce_op_);\n"
                "    Tensor* output;\n"
                "    OP_REQUIRES_OK_ASYNC(\n"
                "        context,\n"
                "        context->forward_input_or_allocate_output(\n"
                "            {0}, 0, context->input(0).shape(), &output),\n"
                "        done);\n"
                "    auto tensor = context->input(0);\n",
            ),
        ),
    ),
    Fix(
        name="keras-3-broadcast",
        repairs="horovod.tensorflow.broadcast_variables(model.variables) stops on Keras 3, whose "
        "variables are not tf.Variable",
        source=f"{_UPSTREAM}/issues/4290",
        proof="tests/parallel/tensorflow/test_engine.py::test_keras_3_variables_are_broadcast",
        edits=(
            Edit(
                "horovod/tensorflow/functions.py",
                "    if inplace:\n        vars_by_device = {}\n",
                "    # A Keras 3 variable holds its tf.Variable in the property `value`.\n"
                "    variables = [v if callable(getattr(v, 'value', v.__class__)) else v.value\n"
                "                 for v in variables]\n"
                "    if inplace:\n        vars_by_device = {}\n",
            ),
        ),
    ),
    Fix(
        name="without-debug-info",
        repairs="wheels carry the compiler's debug information: several times the size and longer "
        "to build",
        source="measured (docs/engine.md)",
        proof="tests/engine/test_build.py::test_installed_engine_has_no_debug_information",
        edits=(Edit("setup.py", "== \"1\" else 'RelWithDebInfo'", "== \"1\" else 'Release'"),),
    ),
)


def select(frameworks: Mapping[str, str], choice: str = "all") -> tuple[Fix, ...]:
    """The fixes for a build against `frameworks` (name -> version); `choice` is all or minimal."""
    return tuple(
        fix for fix in FIXES if (choice == "all" or fix.needed_to_build) and fix.applies(frameworks)
    )


def apply(fixes: Iterable[Fix], tree: Path) -> None:
    """Apply `fixes` to the unpacked Horovod in `tree`, in order.

    Raises:
        FixFailed: names the fix and the file. The tree is then half fixed: throw it away.
    """
    for fix in fixes:
        for path, source in fix.adds.items():
            (tree / path).write_text(added_source(source), encoding="utf-8")
        for edit in fix.edits:
            file = tree / edit.path
            try:
                text = edit.apply(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise FixFailed(
                    f"fix `{fix.name}` does not fit {edit.path}: {error}. The fixes are for the "
                    f"Horovod {HOROVOD_VERSION} sdist from the package index, unchanged; nothing "
                    "was built."
                ) from error
            file.write_text(text, encoding="utf-8")


def added_source(name: str) -> str:
    """The text of a source file that a fix adds."""
    return resources.files("hvdkit.engine").joinpath("sources", name).read_text(encoding="utf-8")


def _shown(text: str) -> str:
    line = next(line.strip() for line in text.splitlines() if line.strip())
    return f"the text `{line}`"
