"""The gradients of a bucket in PyTorch, and the memory that they are packed into."""

import operator
from collections.abc import Callable, Collection, Sequence
from itertools import compress

import torch

from hvdkit.reduction.bucketing import Bucket, ParameterSpec
from hvdkit.torch import shared_memory
from hvdkit.torch.dtensors import local
from hvdkit.torch.reduction import holders
from hvdkit.torch.reduction.casting import cast_scaled_all, dense_strides

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
    strides = dense_strides(parameter)
    dtype = dtype_of_gradient(parameter)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        device=str(parameter.device),
        layout="" if parameter.is_contiguous() or not strides else f"strides {list(strides)}",
    )


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
            (p.shape, dense_strides(p) or _row_major(p.shape), offset)
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
        cast_scaled_all(outside, targets, factor)
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

    def end(self) -> None:
        """See `RoundMemory`."""

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
        cast_scaled_all(gradients, targets, factor)
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
                gradient = p.grad = torch.empty_like(view, dtype=dtype_of_gradient(p))
            views.append(view)
            gradients.append(gradient)
        cast_scaled_all(views, gradients, factor)

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
            p.new_zeros(p.shape, dtype=dtype_of_gradient(p))
            if p.grad is None
            else p.grad.to_dense()
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


def is_nonzero(gradient: torch.Tensor) -> bool:
    """Return whether a gradient has an element that is not 0."""
    values = gradient._values() if gradient.is_sparse else local(gradient)
    if not values.numel():
        return False
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return bool(torch.stack(torch.aminmax(values)).any())  # faster than `any` of all elements
