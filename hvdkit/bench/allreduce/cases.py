"""The cases of an allreduce benchmark: dtype, operation, wire format and size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvdkit.errors import UsageError

#: Name -> bytes per element.
DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
_ALIASES = {
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "fp64": "float64",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
}
OPS = ("sum", "average", "min", "max")
#: `none` sends the buffer in its own dtype.
WIRES = ("none", "fp16", "bf16", "int8")


@dataclass(frozen=True)
class Case:
    """One measurement: a buffer and its reduction.

    Attributes:
        dtype: a name of `DTYPES`.
        op: one of `OPS`.
        wire: one of `WIRES`.
        elements: the length of the buffer.
    """

    dtype: str
    op: str
    wire: str
    elements: int

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer, before it is encoded for the wire."""
        return self.elements * DTYPES[self.dtype]

    @property
    def floating(self) -> bool:
        """Whether the dtype is that of floating-point numbers."""
        return not self.dtype.startswith("int")


def parse_names(text: str, known: Sequence[str], option: str) -> list[str]:
    """Return the names in `text`, which are separated by commas, without repetitions.

    Aliases of dtypes are permitted, such as `fp16` for `float16`.

    Raises:
        UsageError: a name is not known.
    """
    given = [name.strip() for name in text.lower().split(",")]
    names = [name if name in known else _ALIASES.get(name, name) for name in given]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise UsageError(f"{option} has {wrong[0]!r}; expected some of {', '.join(known)}")
    return list(dict.fromkeys(names))


def cases(
    sizes: Sequence[int], dtypes: Sequence[str], ops: Sequence[str], wires: Sequence[str]
) -> Iterator[Case]:
    """Yield all possible combinations; sizes vary fastest. Round sizes down to whole elements."""
    for dtype in dtypes:
        for op in ops:
            for wire in wires:
                elements = dict.fromkeys(max(1, size // DTYPES[dtype]) for size in sizes)
                for count in elements:
                    case = Case(dtype, op, wire, count)
                    if _exists(case):
                        yield case


def _exists(case: Case) -> bool:
    if case.op == "average" and not case.floating:
        return False
    wide = case.dtype in ("float32", "float64")
    return case.wire == "none" or (wide and case.op in ("sum", "average"))


def bus_factor(ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth: 2(n-1)/n.

    A ring allreduce sends 2(n-1)/n times the bytes of the buffer over each link. See
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    """
    return 2 * (ranks - 1) / ranks
