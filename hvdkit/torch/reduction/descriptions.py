"""Texts about the gradients of an optimizer, for errors."""

from collections.abc import Sequence

from hvdkit.torch.reduction.gradients import Gradients
from hvdkit.torch.reduction.records import Record

# The largest number of parameters that an error lists.
_SHOWN = 3


def describe(gradients: Gradients) -> str:
    """Describe `Gradients.signature` for an error."""
    everything, mixed = list(gradients.records.values()), gradients.mixed
    needing = [record for record in everything if record.parameter.requires_grad]
    frozen = [record for record in everything if not record.parameter.requires_grad]
    reduced = [record for record in everything if record.base is not None]
    others = [record for record in needing if record.base is None]
    return (
        f"{len(needing)} of {len(everything)} parameters need gradients{_except(frozen)}"
        + (f", {len(reduced)} have a reduced gradient{_except(others)}" if reduced else "")
        + (f" with the digest {gradients.content():06x}" if reduced else "")
        + (f", {len(mixed)} were changed ({_first(mixed)})" if mixed else "")
        + _outdated_text(gradients)
    )


def _outdated_text(gradients: Gradients) -> str:
    """Return a text about parameters that differ from the plan; "" if there are none."""
    outdated = [
        f"{record.name} is now {str(record.parameter.dtype).removeprefix('torch.')} "
        f"{list(record.parameter.shape)} on {record.parameter.device}"
        for part in gradients.parts
        for record in part.changed_layouts()
    ]
    if not outdated:
        return ""
    return f", {len(outdated)} have another dtype, device or shape than before ({_first(outdated)})"


def _first(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (", ..." if len(texts) > _SHOWN else "")


def _except(records: Sequence[Record]) -> str:
    return f" (not: {_first([record.name for record in records])})" if records else ""
