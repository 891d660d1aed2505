"""Pack, reduce and unpack the gradients of a bucket in PyTorch."""

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.errors import UsageError
from hvdkit.reduction.bucketing import Bucket, BucketPlan, ParameterSpec
from hvdkit.runtime.host_collectives import int8_name
from hvdkit.torch import runtime, shared_memory
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.reduction import holders
from hvdkit.torch.reduction.block_sums import BlockSum

# The number of elements of a piece, which fits into the cache. PyTorch has no CPU operation that
# multiplies and casts in one pass, so both are done piece by piece.
_PIECE = 1 << 17

_NARROW = (torch.float16, torch.bfloat16)

# On an accelerator, tensors of at most this many elements share kernels: to start a kernel takes
# longer (6 us on an H100) than to compute one of them.
_SMALL = 1 << 20


_Layout = tuple[int, tuple[int, ...], torch.Size]


def _layouts(tensors: Sequence[torch.Tensor]) -> list[_Layout]:
    """Return the address, the strides and the shape of each tensor. It loops in C."""
    shapes = map(operator.attrgetter("shape"), tensors)
    strides = map(torch.Tensor.stride, tensors)
    return list(zip(map(torch.Tensor.data_ptr, tensors), strides, shapes, strict=True))


def dtype_of_gradient(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, unless `grad_dtype` is set."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def spec(name: str, parameter: torch.Tensor) -> ParameterSpec:
    """Return the `ParameterSpec` of a parameter."""
    strides = _dense_strides(parameter)
    dtype = dtype_of_gradient(parameter)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        device=str(parameter.device),
        layout="" if parameter.is_contiguous() or not strides else f"strides {list(strides)}",
    )


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides if the elements are contiguous in some order, otherwise None."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tensor.stride()


class TorchMemory:
    """`hvdkit.reduction.backend.BucketMemory`: a bucket's gradients and buffers.

    Buffers are one-dimensional tensors. Views of them have the parameter's shape. If the elements
    of the parameter are contiguous in some order, the view has the parameter's strides. Copies
    between equal strides are fast.

    Args:
        bucket: the bucket.
        parameters: the bucket's parameters.
        on_sparse: called when a sparse gradient is packed as a dense one, with the parameter's
            index in the plan and the number of sparse dimensions.
        keeps_memory: whether a gradient that is referred to elsewhere keeps its memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[torch.Tensor],
        on_sparse: Callable[[int, int], None] = lambda *_: None,
        keeps_memory: bool = True,
    ) -> None:
        self._bucket = bucket
        self._keeps_memory = keeps_memory
        self._parameters = parameters
        self._on_sparse = on_sparse
        # For each parameter: the shape, strides and offset of its part of a buffer.
        self._places = [
            (p.shape, _dense_strides(p) or _row_major(p.shape), offset)
            for p, offset in zip(parameters, bucket.offsets, strict=True)
        ]
        # Buffers that no gradient uses, and their views.
        self._kept: dict[torch.dtype, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        # Buffers whose views are or were gradients, the newest first; the views; and their layouts.
        self._lent: list[tuple[torch.Tensor, list[torch.Tensor], list[_Layout]]] = []
        # Whether a part of a buffer was referred to elsewhere, which pins all of it. Gradients then
        # get memory of their own after each round.
        self._separates = False
        # Parameters whose gradients keep or get memory of their own, with this gradient (None for a
        # new one) and its new value.
        self._own: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        # The gradients when this round has packed them, and their versions.
        self._packed: tuple[list[torch.Tensor], list[int]] = [], []

    @property
    def dtype(self) -> str:
        """The name of the gradients' dtype, without `torch.`."""
        return self._bucket.dtype

    def _empty(self, dtype: torch.dtype, shared: bool) -> torch.Tensor:
        device = torch.device(self._bucket.device)
        if shared and device.type == "cpu":
            return shared_memory.empty(self._bucket.elements, dtype)
        return torch.empty(self._bucket.elements, dtype=dtype, device=device)

    def _buffer(self, dtype: torch.dtype, keep: bool) -> torch.Tensor:
        if dtype in self._kept:
            return self._kept[dtype][0]
        flat = self._empty(dtype, shared=keep)
        if keep:
            self._kept[dtype] = flat, self._all_views(flat)
        return flat

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of a result of `_buffer`."""
        kept, views = self._kept.get(flat.dtype, (None, []))
        return views if kept is flat else self._all_views(flat)

    def _view(self, flat: torch.Tensor, k: int) -> torch.Tensor:
        """Return the part of a buffer that belongs to parameter `k` of the bucket."""
        shape, strides, offset = self._places[k]
        # `.data`, because `p.grad.detach_()` raises for a view.
        return flat.as_strided(shape, strides, offset).data

    def _all_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [self._view(flat, k) for k in range(len(self._parameters))]

    def _lend(self) -> tuple[torch.Tensor, list[torch.Tensor], set[int]]:
        """Return a buffer for `in_place`, which nobody uses but the gradients of this round.

        Memory that is referred to elsewhere is left as it is. All ranks get the same results,
        whatever memory they use.

        Returns:
            The buffer; its views; and the parameters whose gradients are in it, each at its place.
        """
        for n, (flat, views, layouts) in enumerate(self._lent):
            # `Module._apply` and `p.grad.data = ...` can make a view refer to other memory.
            if _layouts(views) != layouts:
                for k, layout in enumerate(layouts):
                    if _layouts(views[k : k + 1]) != [layout]:
                        views[k] = self._view(flat, k)
            tensors = holders.tensors_in(flat, views)
            inside = {k for k, view in enumerate(views) if tensors and self._is_in(flat, view, k)}
            if tensors == len(inside):
                self._lent.insert(0, self._lent.pop(n))
                return flat, views, inside
            # If as many tensors as gradients are held, they need all of the memory. So it is with
            # the sum of earlier passes.
            if tensors is not None and tensors - len(inside) < len(self._places):
                self._separates = True
        flat = self._empty(getattr(torch, self._bucket.dtype), shared=True)
        # Gradients often alternate between two buffers, and a CPU needs long to allocate memory. An
        # accelerator's allocator keeps it.
        two = flat.device.type == "cpu" and holders.tensors_in(flat, ()) is not None
        two = two and not self._separates
        views = self._all_views(flat)
        del self._lent[int(two) :]
        self._lent.insert(0, (flat, views, _layouts(views)))
        return flat, views, set()

    def _is_in(self, flat: torch.Tensor, view: torch.Tensor, k: int) -> bool:
        """Return whether the gradient of parameter `k` is in a buffer, at the place of `view`."""
        shape, strides, offset = self._places[k]
        gradient = self._parameters[k].grad
        return gradient is view or (
            gradient is not None
            and not gradient.is_sparse
            and gradient.dtype == flat.dtype
            and gradient.data_ptr() == flat.data_ptr() + offset * flat.element_size()
            and gradient.shape == shape
            and gradient.stride() == strides
        )

    def _dense(self, k: int, gradient: torch.Tensor) -> torch.Tensor:
        if not gradient.is_sparse:
            return gradient
        self._on_sparse(self._bucket.parameters[k], gradient.sparse_dim())
        return gradient.to_dense()

    def _held(self, left_out: Collection[int] = ()) -> set[int]:
        """Return the parameters whose gradients are referred to elsewhere, and must stay.

        Args:
            left_out: parameters that are not examined.
        """
        numbers, gradients = [], []
        for k, p in enumerate(self._parameters) if self._keeps_memory else ():
            if k not in left_out and p.grad is not None and not p.grad.is_sparse:
                numbers.append(k)
                gradients.append(p.grad)
        return set(compress(numbers, holders.held(gradients)))

    @torch.no_grad()
    def in_place(self, factor: float) -> torch.Tensor:
        """See `BucketMemory`. Does not touch gradients in the buffer if the factor is 1."""
        flat, views, inside = self._lend()
        held = self._held(inside)
        outside, targets, missing = [], [], []
        separates = self._separates and self._keeps_memory
        for k, p in enumerate(self._parameters):
            if k in inside:
                continue
            view = views[k]
            gradient, own = p.grad, None
            if gradient is None or gradient.shape != view.shape:
                missing.append(view)
            else:
                outside.append(self._dense(k, gradient))
                targets.append(view)
                if (k in held or separates) and not gradient.is_sparse and is_writable(gradient):
                    own = gradient
            # A frozen parameter gets no gradient, so that the optimizer skips it. If a parameter
            # has another dtype, device or shape than before, the result of this round is not used.
            if (gradient is not None or p.requires_grad) and fits(p, view):
                p.grad = view
                if own is not None or self._separates:
                    self._own.append((p, own, view))
        _cast_scaled_all(outside, targets, factor)
        for view in missing:
            view.zero_()
        if factor != 1.0 and inside:
            if len(inside) == len(self._places):
                flat.mul_(factor)
            else:
                for k in inside:
                    views[k].mul_(factor)
        self._note_packed()
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    @torch.no_grad()
    def end_round(self, reduced: bool) -> None:
        for p, gradient, view in self._own:
            if p.grad is view:
                if gradient is None:
                    gradient = view.clone()
                elif reduced:
                    gradient.copy_(view)
                p.grad = gradient
        self._own.clear()
        self._packed = [], []

    @torch.no_grad()
    def pack(self, dtype: str, factor: float, keep: bool = True) -> torch.Tensor:
        """See `BucketMemory`. Reads each gradient once."""
        flat = self._buffer(getattr(torch, dtype), keep)
        gradients, targets = [], []
        for k, (p, view) in enumerate(zip(self._parameters, self._views(flat), strict=True)):
            gradient = p.grad
            if gradient is None or gradient.shape != view.shape:
                view.zero_()
            else:
                gradients.append(self._dense(k, gradient))
                targets.append(view)
        _cast_scaled_all(gradients, targets, factor)
        self._note_packed()
        return flat

    def _note_packed(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._packed = gradients, holders.versions(gradients)

    @property
    def is_changed(self) -> bool:
        gradients, versions = self._packed
        now = holders.versions(gradients)
        return now != versions and any(
            new != old and self._counts_alone(gradient)
            for gradient, old, new in zip(gradients, versions, now, strict=True)
        )

    def _counts_alone(self, gradient: torch.Tensor) -> bool:
        """Return whether the version of a gradient certainly counts its own changes only.

        If the script keeps all gradients in one tensor, its parts count their changes together.
        """
        if gradient.is_sparse or gradient.untyped_storage().nbytes() == gradient.nbytes:
            return True
        own = [*(flat for flat, _ in self._kept.values()), *(flat for flat, _, _ in self._lent)]
        at = gradient.untyped_storage().data_ptr()
        return any(flat.untyped_storage().data_ptr() == at for flat in own)

    @torch.no_grad()
    def scale(self, buffer: torch.Tensor, factor: float) -> None:
        buffer.mul_(factor)

    @torch.no_grad()
    def unpack(self, buffer: torch.Tensor, factor: float) -> None:
        """See `BucketMemory`. Writes in place, and creates gradients that do not exist."""
        views, gradients = [], []
        for p, view in zip(self._parameters, self._views(buffer), strict=True):
            if p.shape != view.shape:
                continue  # the result of this round is not used, see `in_place`
            gradient = p.grad
            if gradient is None or gradient.is_sparse:
                if gradient is None and not p.requires_grad:
                    continue
                gradient = p.grad = torch.empty_like(p, dtype=dtype_of_gradient(p))
            views.append(view)
            gradients.append(gradient)
        _cast_scaled_all(views, gradients, factor)

    @torch.no_grad()
    def rows(self, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices, int64 of shape [rows, sparse dimensions], and values."""
        (p,) = self._parameters
        dims = self._bucket.sparse_dims
        if p.grad is None:
            indices = torch.empty((0, dims), dtype=torch.int64, device=p.device)
            shape, dtype = (0, *p.shape[dims:]), dtype_of_gradient(p)
            return indices, torch.empty(shape, dtype=dtype, device=p.device)
        gradient = p.grad if p.grad.is_sparse else p.grad.to_sparse(dims)
        # This adds up rows with equal indices, so that fewer rows are sent.
        gradient = gradient.coalesce()
        return gradient.indices().t().contiguous(), gradient.values() * factor

    @torch.no_grad()
    def set_rows(self, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """See `BucketMemory`. Coalesces the rows, so that all ranks have the same gradient."""
        (p,) = self._parameters
        indices, values = rows
        if p.grad is not None or p.requires_grad:
            gathered = torch.sparse_coo_tensor(
                indices.t(), values, p.shape, device=values.device, check_invariants=False
            )
            p.grad = gathered.coalesce()

    @torch.no_grad()
    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, dense; zeros for a missing gradient."""
        return [
            torch.zeros_like(p, dtype=dtype_of_gradient(p)) if p.grad is None else p.grad.to_dense()
            for p in self._parameters
        ]

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Set the gradients."""
        held = self._held()
        for k, (p, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if p.grad is None and not p.requires_grad:
                continue
            new = gradient.to(dtype_of_gradient(p)).view(p.shape)
            if k in held and p.grad is not None and is_writable(p.grad):
                p.grad.copy_(new)
            else:
                p.grad = new


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def is_writable(gradient: torch.Tensor) -> bool:
    """Return whether a dense gradient can be written in place."""
    places = zip(gradient.shape, gradient.stride(), strict=True)
    return not gradient.is_inference() and all(stride or size < 2 for size, stride in places)


def fits(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether PyTorch accepts `gradient` as the parameter's `grad`."""
    return (
        gradient.dtype == dtype_of_gradient(parameter)
        and gradient.device == parameter.device
        and gradient.shape == parameter.shape
    )


class _Scale:
    """A factor for all gradients of a bucket.

    Attributes:
        factor: the factor as a number.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._tensors: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the factor as a tensor of shape [1], made once per dtype."""
        if dtype not in self._tensors:
            self._tensors[dtype] = torch.full((1,), self.factor, dtype=dtype, device=device)
        return self._tensors[dtype]


def _cast_scaled_all(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], factor: float
) -> None:
    """Compute target = source x factor for each pair, rounded once to the target's dtype.

    All tensors are on one device.
    """
    scale = _Scale(factor)
    share = bool(targets) and targets[0].device.type != "cpu"
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
    pairs = {}
    written = set()
    for source, target in zip(sources, targets, strict=True):
        # A kernel that writes a tensor twice would write it in any order.
        if share and _is_small(source, target) and target.data_ptr() not in written:
            written.add(target.data_ptr())
            these, those = pairs.setdefault((source.dtype, target.dtype), ([], []))
            these.append(source)
            those.append(target)
        else:
            _cast_scaled(source, target, scale)
    for dtypes, (these, those) in pairs.items():
        if _fit(*dtypes):
            _cast_scaled_together(these, those, factor)
        else:
            for source, target in zip(these, those, strict=True):
                _cast_scaled(source, target, scale)


def _is_small(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether `torch._foreach_` functions take this pair, and are faster for it."""
    return 0 < source.numel() <= _SMALL and not (source.is_neg() or target.is_neg())


def _fit(first: torch.dtype, second: torch.dtype) -> bool:
    """Return whether one of two floating dtypes of 16 bits or more holds the other's values."""
    return (
        first.is_floating_point
        and second.is_floating_point
        and min(first.itemsize, second.itemsize) > 1
        and torch.promote_types(first, second) in (first, second)
    )


def _cast_scaled_together(
    sources: list[torch.Tensor], targets: list[torch.Tensor], factor: float
) -> None:
    """Compute target = source x factor for pairs of equal dtypes that `_fit`, in a few kernels."""
    # Multiply in the wider dtype. Not in place in 16 bits: on a CPU, `_foreach_mul_` rounds the
    # factor to 16 bits.
    narrow = targets[0].dtype in _NARROW
    multiply_first = factor != 1.0 and (
        narrow or sources[0].dtype.itemsize > targets[0].dtype.itemsize
    )
    if multiply_first:
        sources = list(torch._foreach_mul(sources, factor))
    torch._foreach_copy_(targets, sources)
    if factor != 1.0 and not multiply_first:
        torch._foreach_mul_(targets, factor)


def _cast_scaled(source: torch.Tensor, target: torch.Tensor, scale: _Scale) -> None:
    """Compute target = source x scale, rounded once to the target's dtype."""
    factor = scale.factor
    if factor == 1.0:
        target.copy_(source)
    elif source.dtype == target.dtype and (
        target.dtype.is_floating_point or target.dtype.is_complex
    ):
        torch.mul(source, factor, out=target)
    elif not (target.dtype.is_floating_point or target.dtype.is_complex):
        # Round towards zero, as PyTorch casts.
        target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * factor)
    elif source.device.type != "cpu":
        _cast_scaled_at_once(source, target, scale)
    elif source.dtype in _NARROW and target.dtype not in _NARROW:
        for part, into in _pieces(source, target):
            into.copy_(part).mul_(factor)
    else:
        for part, into in _pieces(source, target):
            into.copy_(part * factor)


def _cast_scaled_at_once(source: torch.Tensor, target: torch.Tensor, scale: _Scale) -> None:
    """Cast and scale in one kernel, which computes in the wider of the two dtypes."""
    # PyTorch computes in the promoted dtype of the operands. A tensor of shape [1] takes part in
    # the promotion; a number, or a tensor without dimensions, does not.
    wide = torch.promote_types(source.dtype, target.dtype)
    if not source.dim():
        # The scale has shape [1], so the result has one dimension too: `out` must have it already.
        source, target = source.view(1), target.view(1)
    torch.mul(source, scale.tensor(wide, source.device), out=target)


def _pieces(
    source: torch.Tensor, target: torch.Tensor
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    count = source.numel()
    strides = _dense_strides(source) if count > _PIECE else None
    if strides is None or strides != target.stride():
        return [(source, target)]
    flat, into = source.as_strided((count,), (1,)), target.as_strided((count,), (1,))
    return list(zip(flat.split(_PIECE), into.split(_PIECE), strict=True))


def _refuse_capture(tensor: torch.Tensor) -> None:
    """Raise UsageError while a CUDA graph is captured on the current stream.

    Horovod waits in its own thread for an event that it records on this stream. During a capture
    the event does not happen, and waiting for it ends the process.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a reduction began while a CUDA graph is captured, but Horovod's collectives cannot be "
            "part of a graph. Call backward() and optimizer.step() outside the capture. To run the "
            "model itself as graphs, use torch.cuda.make_graphed_callables or "
            "torch.compile(mode='reduce-overhead')."
        )


def _abs_max(buffer: torch.Tensor) -> torch.Tensor:
    """Return the absolute maximum, a tensor without dimensions; NaN if an element is NaN."""
    if buffer.device.type != "cpu":
        return torch.linalg.vector_norm(buffer, float("inf"))
    if not _has_aminmax(buffer.dtype):
        return buffer.abs().max()
    low, high = torch.aminmax(buffer)  # faster on a CPU
    return torch.maximum(-low, high)


@functools.cache
def _has_aminmax(dtype: torch.dtype) -> bool:
    """Return whether `torch.aminmax` takes this dtype on a CPU: not float16 with torch 2.1."""
    try:
        torch.aminmax(torch.zeros(1, dtype=dtype, device="cpu"))
    except RuntimeError:
        return False
    return True


class TorchBackend:
    """`hvdkit.reduction.backend.Backend` for a sequence of parameters.

    Args:
        parameters: the parameters, in the order of the synchronizer's specs.
        collectives: the collectives of the ranks to reduce over.
        keeps_memory: see `TorchMemory`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        collectives: TorchCollectives,
        keeps_memory: bool = True,
    ) -> None:
        self._parameters = parameters
        self._keeps_memory = keeps_memory
        self._collectives = collectives
        self._on_accelerator = any(p.device.type != "cpu" for p in parameters)
        #: For each parameter, the largest number of sparse dimensions of its gradients until now.
        self.sparse_seen = [0] * len(parameters)

    def memory(self, bucket: Bucket) -> TorchMemory:
        """See `Backend`. Buffers are allocated on first use."""
        parameters = [self._parameters[i] for i in bucket.parameters]
        return TorchMemory(bucket, parameters, self._record_sparse, self._keeps_memory)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for p in self._parameters:
                if p.grad is not None:
                    p.grad.mul_(factor)

    @torch.no_grad()
    def sum(self, buffer: torch.Tensor, name: str, factor: float) -> Any:
        """See `Backend`: an in-place allreduce."""
        if self._collectives.single_rank or not buffer.numel():
            return buffer if factor == 1.0 else buffer.mul_(factor)
        _refuse_capture(buffer)
        return mpi_ops.allreduce_async_(
            buffer,
            name=name,
            op=mpi_ops.Sum,
            postscale_factor=factor,
            process_set=self._collectives.process_set,
        )

    @torch.no_grad()
    def sum_blocks(self, buffer: torch.Tensor, name: str, factor: float) -> Any:
        """See `Backend`. The engine's own sum on the CPU, otherwise `BlockSum`."""
        if self._collectives.single_rank or not buffer.numel():
            return self.sum(buffer, name, factor)
        process_set = self._collectives.process_set
        in_engine = buffer.device.type == "cpu" and process_set.process_set_id == 0
        if in_engine and runtime.host_collectives.sends_int8():
            return self.sum(buffer, int8_name(name), factor)
        _refuse_capture(buffer)
        return BlockSum(buffer, name, factor, process_set)

    def gather(self, rows: tuple[torch.Tensor, torch.Tensor], name: str) -> Any:
        """See `Backend`: one allgather for the indices and one for the values."""
        if self._collectives.single_rank:
            return rows
        indices, values = rows
        _refuse_capture(values)
        # As integers, because stock Horovod has no bfloat16.
        content = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        return (
            mpi_ops.allgather_async(indices, f"{name}.indices", self._collectives.process_set),
            mpi_ops.allgather_async(content, f"{name}.values", self._collectives.process_set),
            values.dtype,
        )

    def wait(self, handle: Any) -> Any:
        """Wait for `sum`, `sum_blocks` or `gather`. Raises HorovodInternalError on failure."""
        if isinstance(handle, int):
            return mpi_ops.synchronize(handle)
        if isinstance(handle, BlockSum):
            return handle.wait()
        if isinstance(handle, tuple) and len(handle) == 3:
            indices, content, dtype = handle
            return mpi_ops.synchronize(indices), mpi_ops.synchronize(content).view(dtype)
        return handle

    @torch.no_grad()
    def abs_max(self, buffers: Sequence[torch.Tensor]) -> list[float]:
        """See `Backend`. One pass over each buffer, and one copy to the host per device."""
        by_device: dict[torch.device, list[int]] = {}
        for k, buffer in enumerate(buffers):
            by_device.setdefault(buffer.device, []).append(k)
        found = [0.0] * len(buffers)
        for members in by_device.values():
            nonempty = [k for k in members if buffers[k].numel()]
            if not nonempty:
                continue
            largest = [_abs_max(buffers[k]) for k in nonempty]
            if len({each.dtype for each in largest}) > 1:
                largest = [each.double() for each in largest]
            for k, value in zip(nonempty, torch.stack(largest).tolist(), strict=True):
                found[k] = value
        return found

    @property
    def batches_abs_max(self) -> bool:
        """True if a parameter is on an accelerator."""
        return self._on_accelerator

    def sparse_dims(self, i: int) -> int:
        """See `Backend`. The most sparse dimensions of this and all earlier gradients."""
        gradient = self._parameters[i].grad
        if gradient is not None and gradient.is_sparse:
            self._record_sparse(i, gradient.sparse_dim())
        return self.sparse_seen[i]

    def _record_sparse(self, i: int, dims: int) -> None:
        self.sparse_seen[i] = max(self.sparse_seen[i], dims)

    def has_sparse_in(self, plan: BucketPlan) -> bool:
        """Return whether a gradient that is or was sparse has a dense bucket in `plan`."""
        if not plan.buckets:
            return False
        for i, p in enumerate(self._parameters):
            if (gradient := p.grad) is not None and gradient.is_sparse:
                self._record_sparse(i, gradient.sparse_dim())
        planned = {i for bucket in plan.buckets if bucket.sparse_dims for i in bucket.parameters}
        return any(dims and i not in planned for i, dims in enumerate(self.sparse_seen))

    @torch.no_grad()
    def make_sparse(self, dims: Sequence[int], plan: BucketPlan) -> bool:
        """Convert each gradient that is sparse on some rank to a sparse one.

        Args:
            dims: for each parameter, its largest number of sparse dimensions on any rank, or 0.
            plan: the buckets.

        Returns:
            Whether such a gradient has a dense bucket in `plan`.
        """
        self.sparse_seen = list(dims)
        for p, sparse_dims in zip(self._parameters, dims, strict=True):
            if sparse_dims and p.grad is not None and not p.grad.is_sparse:
                p.grad = p.grad.to_sparse(sparse_dims)
        return self.has_sparse_in(plan)
