"""The models whose training and whose gradients are measured."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hvdkit.bench.step.torch_models import resnet50

Shape = tuple[int, ...]


def resnet50_shapes() -> list[Shape]:
    """Return the shapes of ResNet-50's gradients."""
    return [tuple(p.shape) for p in resnet50().parameters()]


def llama_shapes(
    layers: int = 32, width: int = 4096, mlp: int = 11008, vocabulary: int = 32000
) -> list[Shape]:
    """Return the shapes of Llama-7B's gradients (arXiv:2302.13971): 6,738,415,616 elements."""
    layer: list[Shape] = [
        (width,),
        *[(width, width)] * 4,
        (width,),
        (mlp, width),
        (mlp, width),
        (width, mlp),
    ]
    return [(vocabulary, width), *layer * layers, (width,), (vocabulary, width)]


def cut(shapes: Sequence[Shape], limit: int, bytes_per_element: int) -> list[Shape]:
    """Return the first shapes whose elements need at most `limit` bytes together.

    Args:
        shapes: of the parameters.
        limit: bytes that may be used.
        bytes_per_element: of all copies of an element that exist at a time.
    """
    kept, used = [], 0
    for shape in shapes:
        used += prod(shape) * bytes_per_element
        if used > limit:
            break
        kept.append(shape)
    return kept


def gpt(layers: int, width: int, tokens: int, vocabulary: int) -> Any:
    """Return a decoder-only transformer with learned positions and a tied head."""
    import torch
    from torch import nn

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.positions = nn.Parameter(torch.randn(tokens, width) * 0.02)
            # No dropout: all variants compute the same.
            layer = nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(
                layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
            )
            mask = nn.Transformer.generate_square_subsequent_mask(tokens)
            self.register_buffer("mask", mask)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            made = self.tokens(text) + self.positions
            made = self.layers(made, mask=self.mask, is_causal=True)
            return nn.functional.linear(made, self.tokens.weight)

    return GPT()


def loss_function(name: str, model: Any, device: str, dry: bool) -> Callable[[], Any]:
    """Return a function that computes the loss of `model` on random data of the full size."""
    import torch

    cross_entropy = torch.nn.functional.cross_entropy
    if name == "resnet50":
        batch, pixels = (2, 32) if dry else (64, 224)
        images = torch.randn(batch, 3, pixels, pixels, device=device)
        images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device=device)
        return lambda: cross_entropy(model(images), labels)
    batch, tokens, vocabulary = GPT_DRY if dry else GPT_FULL
    text = torch.randint(vocabulary, (batch, tokens), device=device)
    following = torch.randint(vocabulary, (batch * tokens,), device=device)
    return lambda: cross_entropy(model(text).view(batch * tokens, vocabulary), following)


#: Batch, tokens and vocabulary.
GPT_FULL = (8, 1024, 50304)
GPT_DRY = (2, 16, 512)


def build(name: str, device: str, dry: bool) -> Any:
    """Return the model `resnet50` or `gpt` on `device`, the same in every process."""
    import torch

    torch.manual_seed(0)
    if name == "resnet50":
        model = resnet50()
        if dry:
            # The first stage and a head.
            pool, flatten, _ = model[-3:]
            model = torch.nn.Sequential(*model[:5], pool, flatten, torch.nn.Linear(256, 1000))
        return model.to(device, memory_format=torch.channels_last)
    _, tokens, vocabulary = GPT_DRY if dry else GPT_FULL
    layers, width = (2, 64) if dry else (12, 768)
    return gpt(layers, width, tokens, vocabulary).to(device)
