"""Digests of tensors, with which the ranks compare them; see `hvdkit.agreement.replicas`."""

from collections import Counter
from typing import Any

import torch
import xxhash

from hvdkit.torch.dtensors import local

# Words of 64 bits.
_CHUNK = 1 << 21
# The odd constant of a published mixing function of this form.
_MIXER = 0xD6E8FEB86659FD93


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local content of a dense tensor as a one-dimensional uint8 tensor.

    The result may share the tensor's memory.
    """
    plain = local(tensor).detach().as_subclass(torch.Tensor)
    contiguous = plain.resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor with one element may have any stride, which `view` would refuse.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


@torch.no_grad()
def digests(tensors: list[torch.Tensor]) -> list[int]:
    """Return a 64-bit digest of each tensor, with one copy to the host for all accelerators."""
    found: list[int | torch.Tensor] = []
    for tensor in tensors:
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        content = bytes_of(dense)
        if content.device.type == "cpu":
            host: Any = content.numpy()
            found.append(xxhash.xxh64_intdigest(host) if len(host) else 0)
        else:
            found.append(_digest_on_device(content))
    computed = [each for each in found if isinstance(each, torch.Tensor)]
    values = iter(
        torch.stack([each.to(computed[0].device) for each in computed]).tolist() if computed else []
    )
    return [
        (next(values) if isinstance(each, torch.Tensor) else each) & 0xFFFFFFFFFFFFFFFF
        for each in found
    ]


class GradientDigest:
    """A digest of the gradients of a rank's first backward passes.

    The order in which the gradients of a pass are added does not matter.

    Args:
        most: the number of gradients of each parameter; later ones are ignored.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._digests: list[int] = []
        self._passes: Counter[int] = Counter()

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Add a gradient, unless it is zero or not finite.

        Args:
            number: the number of its parameter.
            gradient: the gradient, dense or sparse.
        """
        if self._passes[number] == self._most:
            return
        self._passes[number] += 1
        sparse = gradient.is_sparse
        parts = [gradient._indices(), gradient._values()] if sparse else [local(gradient)]
        # Usually the first elements suffice, and `any` of a large tensor takes long.
        elements = parts[-1].reshape(-1)
        if not bool(elements[:1024].any()) and not bool(elements.any()):
            return
        # Gradients of different data may be NaN alike, as after an overflow.
        if bool(elements.isfinite().all()):
            text = f"{number} {self._passes[number]} {digests(parts)}"
            self._digests.append(xxhash.xxh64_intdigest(text.encode()))

    def result(self) -> int | None:
        """Return the digest, of 64 bits; None without gradients that are not zero."""
        return sum(self._digests) % (1 << 64) or None


def _digest_on_device(content: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed 64-bit words, in integers that wrap around.

    A plain or weighted sum would miss changes that users have: the sign bit adds 2^63 to a word
    whatever the weight is, so a second change of a sign would cancel the first one. Each word is
    therefore added to a number for its position, and mixed by a function that is not linear. This
    function maps different words to different words, so a change of one word always changes the
    sum. Other changes cancel by chance only.

    The result depends on the bytes alone, on every device that stores the lowest byte first.
    """
    whole = content.numel() // 8 * 8
    chunks: list[torch.Tensor] = []
    if whole:
        # A view needs an address that is a multiple of 8 bytes.
        aligned = content.data_ptr() % 8 == 0
        words = (content if aligned else content.clone())[:whole].view(torch.int64)
        chunks += words.split(_CHUNK)
    if whole < content.numel():
        rest = content.new_zeros(8)
        rest[: content.numel() - whole] = content[whole:]
        chunks.append(rest.view(torch.int64))
    total = torch.full((), content.numel(), dtype=torch.int64, device=content.device)
    length = min(_CHUNK, max(whole // 8, 1))
    positions = torch.arange(1, 2 * length, 2, device=content.device)
    step = 1
    for chunk in chunks:
        # A power of an odd number: the numbers for the positions differ in all chunks.
        step = step * _MIXER % (1 << 64)
        total += _mixed(chunk.add(positions[: chunk.numel()], alpha=_signed(step))).sum()
    return total


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each word in place: a flip of any bit flips about half of the 64 bits.

    Two rounds of multiplication are needed. After one round, two equal changes at different
    positions cancel with a probability of up to 2^-22; after two rounds, below 2^-37.
    """
    # The second half of a word has its high bits. A shift of the word would copy its sign.
    low, high = words.view(torch.int32).view(-1, 2).unbind(1)
    low ^= high
    for _ in range(2):
        words *= _signed(_MIXER)
        low ^= high
    return words


def _signed(number: int) -> int:
    """Return the int64 with the same bits as an unsigned number."""
    return number - (1 << 64) if number >> 63 else number
