"""The models of `scripts/bench_sync`, in PyTorch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def resnet50() -> "torch.nn.Module":
    """Return ResNet-50 as in torchvision: 161 parameters, 25,557,032 elements."""
    from torch import nn

    def convolution(channels: int, to: int, width: int, stride: int = 1) -> list[nn.Module]:
        layer = nn.Conv2d(channels, to, width, stride, padding=width // 2, bias=False)
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        return [layer, nn.BatchNorm2d(to)]

    class Bottleneck(nn.Module):
        def __init__(self, channels: int, width: int, stride: int) -> None:
            super().__init__()
            self.branch = nn.Sequential(
                *convolution(channels, width, 1),
                nn.ReLU(inplace=True),
                *convolution(width, width, 3, stride),
                nn.ReLU(inplace=True),
                *convolution(width, 4 * width, 1),
            )
            shortcut = convolution(channels, 4 * width, 1, stride)
            self.shortcut = nn.Sequential(*(shortcut if channels != 4 * width else ()))

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            return nn.functional.relu(self.branch(x) + self.shortcut(x), inplace=True)

    layers = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width = 64 << stage
            layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers)


def image_loss() -> Callable[[Any], Any]:
    """Return the loss of an image model for one random image."""
    import torch

    image, label = torch.randn(1, 3, 224, 224), torch.randint(1000, (1,))
    return lambda model: torch.nn.functional.cross_entropy(model(image), label)


VOCABULARY, TOKENS, WIDTH = 32_000, 128, 512


def transformer() -> "torch.nn.Module":
    """Return a transformer with 12 layers and a tied output layer.

    The last gradient to become ready has 66 MB of the 217 MB.
    """
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
            # No dropout, so that all variants compute the same.
            layer = nn.TransformerEncoderLayer(
                WIDTH, 8, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(
                layer, 12, nn.LayerNorm(WIDTH), enable_nested_tensor=False
            )

        def forward(self, text: "torch.Tensor") -> "torch.Tensor":
            made = self.layers(self.tokens(text) + self.positions)
            return nn.functional.linear(made, self.tokens.weight)

    import torch

    return Transformer()


def text_loss() -> Callable[[Any], Any]:
    """Return the loss of a text model for one random text."""
    import torch

    text, following = torch.randint(VOCABULARY, (2, 1, TOKENS))
    return lambda model: torch.nn.functional.cross_entropy(model(text)[0], following[0])
