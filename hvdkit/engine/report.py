"""What `hvdkit build` shows of a plan and of the fixes, for people."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hvdkit.engine import cache, fixes
from hvdkit.engine.cuda import Gpu
from hvdkit.engine.plan import Plan


def show_plan(plan: Plan, console: Console, details: bool = False) -> None:
    """Print what was found and decided; with `details` fixes, environment and command too."""
    frameworks = ", ".join(
        f"{f.name} {f.version} ({'C++11' if f.cxx11_abi else 'old'} ABI, "
        f"{'CUDA ' + f.cuda if f.cuda else 'CPU'})"
        for f in plan.frameworks
    )
    mpi = f"{plan.mpi.version}, {plan.mpi.mpicxx}" if plan.mpi else "not used"
    rows = [
        ("engine", f"Horovod {plan.version}, {len(plan.fixes)} fixes ({plan.fix_choice})"),
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
    _print(console, "\nfixes:")
    for fix in plan.fixes:
        _print(console, f"  {fix.name:28} {fix.repairs}")
    _print(console, "\nenvironment:")
    for name, value in sorted(plan.settings().items()):
        _print(console, f"  {name}={shlex.quote(value)}")
    _print(console, "\ncommand, in the unpacked and fixed sdist:")
    _print(console, f"  {shlex.join(plan.command(Path('dist')))}")
    _print(console, "\nDry run: nothing was touched.")


def _gpu(gpu: Gpu) -> str:
    if gpu.toolkit is None:
        return f"none: {gpu.reason}"
    kit = f"CUDA {gpu.toolkit.version}, architectures {' '.join(gpu.toolkit.architectures)}"
    if gpu.nccl is None:
        return f"PyTorch's tensors through host memory, {kit}; no NCCL: {gpu.reason}"
    return f"NCCL {gpu.nccl.version}, {kit}"


def list_fixes(console: Console) -> None:
    """Print the table of fixes."""
    for fix in fixes.FIXES:
        kind = "needed to build" if fix.needed_to_build else "repairs behaviour"
        only = f", for {fix.only_for}" if fix.only_for else ""
        _print(console, f"{fix.name} ({kind}{only})")
        _print(console, f"    {fix.repairs}")
        _print(console, f"    source: {fix.source}")
        _print(console, f"    proof:  {fix.proof}")
    _print(console, f"\n{len(fixes.FIXES)} fixes for Horovod {fixes.HOROVOD_VERSION}.")


def _print(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False)
