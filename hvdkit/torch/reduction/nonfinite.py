"""Find the gradients of a backward pass that contain NaN or infinity."""

import torch

from hvdkit.torch.dtensors import local


class NonFiniteNames:
    """The names of this rank's gradients with NaN or infinity, since the last round.

    It computes the sum of each gradient. The sum is not finite if an element of the gradient is not
    finite. The host reads the sums of a device once, when the pass has ended.

    Args:
        checks: whether to look at gradients. If not, the caller does not add any.
    """

    def __init__(self, checks: bool = True) -> None:
        self.checks = checks
        # Name -> whether the gradient is finite, or its sum on an accelerator.
        self._finite: dict[str, bool | torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._finite

    @torch.no_grad()
    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of a parameter, in the order in which a pass computes them.

        It replaces an earlier gradient of the parameter.
        """
        self._finite.pop(name, None)
        values = gradient._values() if gradient.is_sparse else local(gradient)
        # Compute the sum now: at the end of the pass, the gradient may be reduced in place already.
        if values.device.type == "cpu":
            # The sum is in the gradient's own dtype, because float64 takes 4 times as long. It may
            # overflow although all elements are finite.
            self._finite[name] = bool(values.sum().isfinite()) or bool(values.isfinite().all())
            return
        # In these wide dtypes the sum does not overflow. The host does not wait for the device.
        wide = torch.complex128 if values.is_complex() else torch.float64
        self._finite[name] = values.sum(dtype=wide)

    @torch.no_grad()
    def names(self) -> list[str]:
        """Return the names, in the order in which the gradients were computed."""
        sums = {name: s for name, s in self._finite.items() if isinstance(s, torch.Tensor)}
        if sums:
            device = next(iter(sums.values())).device
            finite = torch.stack([s.isfinite().to(device) for s in sums.values()]).tolist()
            self._finite.update(zip(sums, finite, strict=True))
        return [name for name, finite in self._finite.items() if not finite]

    def clear(self) -> None:
        """Forget all gradients."""
        self._finite.clear()

    def take(self) -> list[str]:
        """Return the names, and forget all gradients."""
        names = self.names()
        self.clear()
        return names
