"""Print a plan for `hvdkit build`, and the patches for `hvdkit build --list-patches`."""

from __future__ import annotations

import shlex
from pathlib import Path

from hvdkit.console.tables import Console
from hvdkit.engine import cache, patches
from hvdkit.engine.cuda import Gpu
from hvdkit.engine.plan import Plan


def show_plan(plan: Plan, console: Console, details: bool = False) -> None:
    """Print the plan; with `details`, also patches, environment and command."""
    frameworks = ", ".join(
        f"{f.name} {f.version} ({'C++11' if f.cxx11_abi else 'old'} ABI, "
        f"{'CUDA ' + f.cuda if f.cuda else 'CPU'})"
        for f in plan.frameworks
    )
    mpi = f"{plan.mpi.version}, {plan.mpi.mpicxx}" if plan.mpi else "not used"
    rows = [
        ("engine", f"Horovod {plan.version}, {len(plan.patches)} patches ({plan.patch_choice})"),
        ("frameworks", frameworks),
        ("controllers", ", ".join(plan.controllers)),
        ("MPI", mpi),
        ("GPU", _gpu(plan.gpu)),
        ("compiler", f"{plan.compiler.version}, {plan.compiler.path}, {plan.jobs} at once"),
        ("CMake", f"{plan.cmake.version}, {plan.cmake.path or 'for this build only'}"),
    ]
    for name, value in rows:
        console.print(f"{name:12} {value}")
    for warning in plan.warnings:
        console.print(f"{'warning':12} {warning}")
    if not details:
        return
    kept = cache.lookup(plan.key)
    console.print(f"{'cache':12} {kept or f'does not have it yet (key {plan.key})'}")
    console.print("\npatches:")
    for patch in plan.patches:
        console.print(f"  {patch.name:28} {patch.description}")
    console.print("\nenvironment:")
    for name, value in sorted(plan.settings().items()):
        console.print(f"  {name}={shlex.quote(value)}")
    console.print("\ncommand, in the patched sdist:")
    console.print(f"  {shlex.join(plan.command(Path('dist')))}")
    console.print("\nDry run: nothing was changed.")


def _gpu(gpu: Gpu) -> str:
    if gpu.toolkit is None:
        return f"none: {gpu.reason}"
    kit = f"CUDA {gpu.toolkit.version}, architectures {' '.join(gpu.toolkit.architectures)}"
    if gpu.nccl is None:
        return f"PyTorch's tensors through host memory, {kit}; no NCCL: {gpu.reason}"
    return f"NCCL {gpu.nccl.version}, {kit}"


def list_patches(console: Console) -> None:
    """Print the table of patches."""
    series = patches.series()
    for patch in series:
        kind = "needed to build" if patch.minimal else "changes behaviour"
        console.print(f"{patch.name} ({kind})")
        console.print(f"    {patch.description}")
        console.print(f"    origin: {patch.origin}")
        console.print(f"    test:   {patch.test}")
    console.print(f"\n{len(series)} patches for Horovod {patches.HOROVOD_VERSION}.")
