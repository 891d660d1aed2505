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
        _print(console, f"{name:12} {value}")
    for warning in plan.warnings:
        _print(console, f"{'warning':12} {warning}")
    if not details:
        return
    kept = cache.lookup(plan.key)
    _print(console, f"{'cache':12} {kept or f'does not have it yet (key {plan.key})'}")
    _print(console, "\npatches:")
    for patch in plan.patches:
        _print(console, f"  {patch.name:28} {patch.description}")
    _print(console, "\nenvironment:")
    for name, value in sorted(plan.settings().items()):
        _print(console, f"  {name}={shlex.quote(value)}")
    _print(console, "\ncommand, in the patched sdist:")
    _print(console, f"  {shlex.join(plan.command(Path('dist')))}")
    _print(console, "\nDry run: nothing was changed.")


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
        _print(console, f"{patch.name} ({kind})")
        _print(console, f"    {patch.description}")
        _print(console, f"    origin: {patch.origin}")
        _print(console, f"    test:   {patch.test}")
    _print(console, f"\n{len(series)} patches for Horovod {patches.HOROVOD_VERSION}.")


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False)
