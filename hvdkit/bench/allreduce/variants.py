"""The variants of an allreduce benchmark: libraries and controllers."""

from collections.abc import Iterable
from dataclasses import dataclass

from hvdkit.bench.allreduce.cases import Case
from hvdkit.bench.software import FLAT, INSTALLED, STOCK, Needs

#: The functions of `horovod.torch`, on the installed engine.
ENGINE = "engine"
TORCH = "torch"
MPI4PY = "mpi4py"
RING = "mpi4py-ring"

_CONTROLLERS = ("gloo", "mpi")


@dataclass(frozen=True)
class Variant:
    """A library, and the controller of its job.

    Attributes:
        library: `hvdkit`, FLAT, ENGINE, STOCK, TORCH, MPI4PY, RING; or the NAME of `--engine`,
            which stands for hvdkit on that engine.
        controller: `gloo` or `mpi`.
    """

    library: str
    controller: str

    @property
    def name(self) -> str:
        """The name on the command line and in the table."""
        if self.library in (MPI4PY, RING):
            return self.library
        return f"{self.library}-{self.controller}"

    @property
    def needs(self) -> Needs:
        """See `software.Variant`."""
        if self.library in (MPI4PY, RING):
            return Needs("", ("mpi4py",), "mpi")
        if self.library == TORCH:
            return Needs("", ("torch",), self.controller)
        installed = self.library in ("hvdkit", FLAT, ENGINE)
        engine = INSTALLED if installed else self.library
        return Needs(engine, ("torch",), self.controller)

    @property
    def calls_hvdkit(self) -> bool:
        """Whether it calls hvdkit, with buffers in the memory of hvdkit's buckets."""
        return self.library not in (ENGINE, STOCK, TORCH, MPI4PY, RING)

    def supports(self, case: Case, has_bfloat16: bool) -> bool:
        """Return whether the variant can reduce the case.

        Args:
            case: the case.
            has_bfloat16: whether its engine has bfloat16.
        """
        if self.library in (MPI4PY, RING):
            # MPI has no 16-bit floating-point numbers.
            return case.wire == "none" and case.dtype not in ("float16", "bfloat16")
        if self.library == TORCH:
            return case.wire == "none"
        if self.library in (ENGINE, STOCK):
            if case.dtype == "bfloat16" and not has_bfloat16:
                return False
            return case.wire in ("none", "fp16")
        return has_bfloat16 or "bf16" not in (case.wire, case.dtype.replace("bfloat", "bf"))


def known(engines: Iterable[str]) -> list[Variant]:
    """Return all variants.

    Args:
        engines: the names of `--engine`.
    """
    libraries = ["hvdkit", FLAT, *engines, ENGINE, STOCK]
    found = [Variant(library, over) for library in libraries for over in _CONTROLLERS]
    found.append(Variant(TORCH, "gloo"))
    return [*found, Variant(MPI4PY, "mpi"), Variant(RING, "mpi")]


def by_default(variant: Variant) -> bool:
    """Return whether a variant is measured if `--variants` is not given."""
    on_demand = variant.library in (FLAT, ENGINE)
    return not on_demand and (variant.controller == "gloo" or variant.library in (MPI4PY, RING))
