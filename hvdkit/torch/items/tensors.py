"""A torch tensor as a checkpoint reads and writes it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from hvdkit.checkpoint import dtypes
from hvdkit.checkpoint.sharding import Divided
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.errors import UsageError
from hvdkit.torch.digests import bytes_of
from hvdkit.torch.dtensors import first_indices, is_dtensor, local, with_local

#: dtype of torch -> its name in safetensors. Older versions of torch do not have all of them.
_DTYPES = {
    getattr(torch, name): code for name, code in dtypes.CODES.items() if hasattr(torch, name)
}
_BY_CODE = {code: dtype for dtype, code in _DTYPES.items()}

CPU = torch.device("cpu")


class TorchTensor:
    """A `hvdkit.checkpoint.state.Tensor` for a torch tensor on any device.

    Args:
        tensor: a tensor of a class that overrides no operations, because the content of other
            classes may be in other tensors.
        subject: its name in errors.

    Raises:
        UsageError: the tensor's class, dtype or layout is not supported, or the tensor is not
            initialised.
    """

    def __init__(self, tensor: torch.Tensor, subject: str = "a tensor") -> None:
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{subject} is not initialised and has no shape: call the model on one batch first"
            )
        kind = type(tensor)
        if is_dtensor(tensor):
            raise UsageError(
                f"{subject} is a DTensor, of which this rank has a part: expected a plain tensor. "
                f"A hvd.Checkpointer saves DTensors of its model= and optimizer="
            )
        if _has_own_operations(kind):
            raise UsageError(
                f"{subject} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
                f"hold: expected a torch.Tensor, or a subclass that overrides no operations. "
                f"Convert it, or return its component tensors from get_extra_state()"
            )
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            raise UsageError(
                f"{subject} is {tensor.dtype} with layout {tensor.layout}: a checkpoint holds "
                f"dense tensors of {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
            )
        self.tensor = tensor.detach()
        # The writer thread must read after the operations that this thread has started.
        self._stream: AbstractContextManager[Any] = (
            torch.cuda.stream(torch.cuda.current_stream(tensor.device))
            if tensor.is_cuda
            else nullcontext()
        )
        self._staged: torch.Tensor | None = None

    @property
    def spec(self) -> TensorSpec:
        """Its dtype and shape."""
        return TensorSpec(_DTYPES[self.tensor.dtype], tuple(self.tensor.shape))

    @torch.no_grad()
    def read(self, out: np.ndarray) -> None:
        """Copy the content into `out`, directly from the device."""
        # For an empty array, `view(dtype)` fails.
        if not self.tensor.numel():
            return
        shape = self.tensor.shape
        with self._stream:
            torch.from_numpy(out).view(self.tensor.dtype).view(shape).copy_(self.tensor)

    def memory(self) -> np.ndarray | None:
        """Return the tensor's memory if it is contiguous and on the CPU, else None."""
        tensor = self.tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        memory: np.ndarray = bytes_of(tensor).numpy()
        return memory

    def content(self) -> bytes:
        """Return a copy of the content."""
        out = np.empty(self.tensor.nbytes, np.uint8)
        self.read(out)
        return out.tobytes()

    @torch.no_grad()
    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Copy `content` into the tensor, directly to the device."""
        tensor = self.tensor
        if not tensor.numel():
            return
        piece = torch.from_numpy(content).view(tensor.dtype)
        first = start // tensor.element_size()
        if piece.numel() == tensor.numel():
            tensor.copy_(piece.view(tensor.shape))
        elif tensor.is_contiguous():
            tensor.view(-1)[first : first + piece.numel()].copy_(piece)
        else:
            # The tensor has another memory order: collect the pieces first.
            if self._staged is None:
                self._staged = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
            self._staged[first : first + piece.numel()].copy_(piece)
            if first + piece.numel() == tensor.numel():
                tensor.copy_(self._staged.view(tensor.shape))
                self._staged = None


class DTensorPart(Divided):
    """A `Divided` for a DTensor.

    Args:
        tensor: the DTensor.
        subject: its name in errors.

    Raises:
        UsageError: see `TorchTensor` and `first_indices`.
    """

    def __init__(self, tensor: torch.Tensor, subject: str) -> None:
        self.tensor = tensor.detach()
        part = TorchTensor(local(tensor), subject)
        super().__init__(part, tensor.shape, first_indices(tensor, subject), has_copies=True)


class SharePart(Divided):
    """A `Divided` for a share of a tensor: some of its elements, in row-major order.

    Args:
        own: the share of this rank, of shape [elements].
        like: a tensor with the shape of the whole one.
        first: the place of the first element of the share.
    """

    def __init__(self, own: torch.Tensor, like: torch.Tensor, first: int) -> None:
        self.tensor = own.detach()
        super().__init__(TorchTensor(own), like.shape, (first,), indexed=(like.numel(),))


#: What a tree of a torch model or optimizer has in place of a tensor.
Held = TorchTensor | DTensorPart | SharePart


def held(tensor: torch.Tensor, subject: str = "a tensor") -> Held:
    """Return a `Tensor` for a plain tensor or a DTensor.

    Raises:
        UsageError: see `TorchTensor` and `DTensorPart`.
    """
    return DTensorPart(tensor, subject) if is_dtensor(tensor) else TorchTensor(tensor, subject)


def writable(tensor: torch.Tensor, subject: str) -> Held:
    """Return a `Tensor` that a restore can write to.

    Raises:
        UsageError: see `held`; or the tensor is on the meta device, or several of its
            elements share one place in memory.
    """
    wrapped = held(tensor, subject)
    if local(tensor).is_meta:
        raise UsageError(
            f"{subject} is on the meta device and has no content: first create it on a "
            f"device, for example with Module.to_empty()"
        )
    if overlaps(tensor):
        raise UsageError(
            f"{subject} has several elements in one place of its memory, as expand() makes them: "
            f"expected a tensor that a restore can write to. Use clone() or contiguous() first"
        )
    return wrapped


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the dtype of a tensor."""
    return _BY_CODE[spec.dtype]


def empty(
    spec: TensorSpec, device: torch.device, order: Sequence[int] | None = None
) -> torch.Tensor:
    """Return new memory for a tensor; `order`: see `memory_order` (default: row-major)."""
    order = range(len(spec.shape)) if order is None else order
    return torch.empty_permuted(spec.shape, [*order], dtype=_BY_CODE[spec.dtype], device=device)


def empty_like(tensor: torch.Tensor, dtype: str, device: torch.device) -> torch.Tensor:
    """Return new memory for a tensor that is divided as the DTensor `tensor`."""
    part = torch.empty_like(local(tensor), dtype=_BY_CODE[dtype], device=device)
    return with_local(part, tensor)


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for tensors of the same memory."""
    if not is_dtensor(tensor):
        return tensor.data_ptr(), tensor.device
    # Some ranks may have an empty part, without an address.
    part = local(tensor)
    return part.untyped_storage()._cdata, part.storage_offset()


def memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a value that is equal for tensors of the same memory and shape."""
    return *identity(tensor), tensor.dtype, tuple(tensor.shape), local(tensor).stride()


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor share one place in memory."""
    part = local(tensor)
    lengths = zip(part.shape, part.stride(), strict=True)
    return any(length > 1 and stride == 0 for length, stride in lengths)


def _has_own_operations(kind: type) -> bool:
    function = getattr(kind, "__torch_function__", None)
    plain = (
        vars(torch.Tensor)["__torch_function__"].__func__,
        # The function of parameters.
        torch._C._disabled_torch_function_impl,
    )
    if getattr(function, "__func__", function) not in plain:
        return True
    return getattr(kind, "__torch_dispatch__", None) != torch.Tensor.__torch_dispatch__
