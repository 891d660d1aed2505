"""Find the gradients of a backward pass that contain NaN or infinity."""

import torch


class NonFiniteNames:
    """The names of this rank's gradients with NaN or infinity, since the last round.

    It computes the sum of each gradient. The sum is not finite if an element of the gradient is not
    finite. The host reads the sums of a device once, when the pass has ended.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._found: dict[str, None] = {}

    @torch.no_grad()
    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of a parameter, in the order in which a pass computes them.

        It replaces an earlier gradient of the parameter.
        """
        self.discard(name)
        values = gradient._values() if gradient.is_sparse else gradient
        # Compute the sum now: at the end of the pass, the gradient may be reduced in place already.
        if values.device.type == "cpu":
            # The sum is in the gradient's own dtype, because float64 takes 4 times as long. It may
            # overflow although all elements are finite.
            if not values.sum().isfinite() and not values.isfinite().all():
                self._found[name] = None
            return
        # In these wide dtypes the sum does not overflow. The host does not wait for the device.
        wide = torch.complex128 if values.is_complex() else torch.float64
        self._sums[name] = values.sum(dtype=wide)

    def discard(self, name: str) -> None:
        """Forget the gradient of a parameter."""
        self._sums.pop(name, None)
        self._found.pop(name, None)

    @torch.no_grad()
    def names(self) -> list[str]:
        """Return the names, in the order in which the gradients were computed."""
        if self._sums:
            device = next(iter(self._sums.values())).device
            finite = torch.stack([s.isfinite().to(device) for s in self._sums.values()]).tolist()
            names = zip(self._sums, finite, strict=True)
            self._found |= dict.fromkeys(name for name, is_finite in names if not is_finite)
            self._sums.clear()
        return list(self._found)

    def clear(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        self._found.clear()
