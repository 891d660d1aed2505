"""Check that tensors have memory of their own, before Horovod reads the memory.

Horovod reads `data_ptr()` of a tensor. The elements of some tensors are not there: those of a
DTensor are in other tensors, one on each rank. Horovod would read invalid memory, and the process
would end with a segmentation fault.
"""

from typing import Any

import torch

from hvdkit.errors import UsageError
from hvdkit.torch.dtensors import is_dtensor


def check_has_memory(tensor: torch.Tensor, subject: str) -> None:
    """Check that a tensor has memory of its own, or will have it.

    Args:
        tensor: the tensor.
        subject: its name in the error.

    Raises:
        UsageError: the tensor is a DTensor, or of another class with operations of its own; or it
            is not initialised.
    """
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return
    if is_dtensor(tensor):
        raise UsageError(
            f"{subject} is a DTensor, as fully_shard (FSDP2) and parallelize_module (tensor "
            f"parallel) make them: each rank has a part of it, and ranks with different parts "
            f"cannot combine them. Expected a plain tensor: pass tensor.full_tensor(), or "
            f"tensor.to_local() with the process set of the ranks that have the same part"
        )
    if has_own_dispatch(tensor):
        raise UsageError(
            f"{subject} is a {kind.__module__}.{kind.__qualname__}, whose elements are in other "
            f"tensors: expected a torch.Tensor. Pass these other tensors"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise UsageError(
            f"{subject} is not initialised and has no shape: call the model on one batch first"
        )


def check_plain(tensor: torch.Tensor, subject: str) -> None:
    """Check that the memory of a tensor has all of its elements.

    Args:
        tensor: the tensor.
        subject: its name in the error.

    Raises:
        UsageError: see `check_has_memory`; or the tensor is sparse, quantised, or on the meta
            device.
    """
    check_has_memory(tensor, subject)
    if problem := _problem(tensor):
        raise UsageError(
            f"{subject} {problem}: expected a dense tensor on a CPU or a GPU. Omit it here, and "
            f"send it with broadcast_object()"
        )


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Return whether the class of a tensor overrides the operations of PyTorch's dispatcher."""
    own = getattr(type(tensor), "__torch_dispatch__", None)
    return bool(own != torch.Tensor.__torch_dispatch__)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor has all of its elements; see `check_plain`."""
    return not (has_own_dispatch(tensor) or _problem(tensor))


def _problem(tensor: torch.Tensor) -> str:
    """Return why the memory of a tensor of a plain class lacks elements; "" if it has all."""
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype})"
    if tensor.is_meta:
        return "is on the meta device, so it has no content"
    return "is nested" if tensor.is_nested else ""


class Traffic:
    """The tensors of this rank's collectives since the process began.

    Attributes:
        bytes: their size, without those of `hvdkit.torch.collectives`.
    """

    def __init__(self) -> None:
        self.bytes = 0


#: The traffic of this process.
traffic = Traffic()


def check_collectives(mpi_ops: Any) -> None:
    """Make the collectives of `horovod.torch.mpi_ops` check and count their tensors.

    Each of them calls `_check_function` before it passes a tensor to the engine. The collectives on
    several tensors call it for the first one only.
    """
    original = mpi_ops._check_function

    def check_function(factory: Any, tensor: torch.Tensor) -> Any:
        check_has_memory(tensor, "the tensor of a collective")
        traffic.bytes += tensor.nbytes
        return original(factory, tensor)

    mpi_ops._check_function = check_function
    for name in ("allreduce", "allgather", "reducescatter"):
        function = f"_grouped_{name}_async"
        setattr(mpi_ops, function, _checking_all(getattr(mpi_ops, function)))


def _checking_all(function: Any) -> Any:
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for k, tensor in enumerate(tensors):
            check_has_memory(tensor, f"tensor {k} of a collective")
            traffic.bytes += tensor.nbytes
        return function(tensors, *args, **kwargs)

    return checked
