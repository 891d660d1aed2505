"""The models of `hvdkit bench step`, in PyTorch.

`MODELS` has two functions for each name. The first makes the model. The second takes a batch size,
makes random data, and returns the loss: a function of the model.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Loss = Callable[[Any], Any]


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


def vgg16() -> "torch.nn.Module":
    """Return VGG-16 as in torchvision, without dropout: 32 parameters, 138,357,544 elements.

    The largest parameter has 102,760,448 elements, 411 MB.
    """
    from torch import nn

    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True)]
    layers += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers)


def image_loss(batch: int) -> Loss:
    """Return the loss of an image model for random images of 224 x 224."""
    import torch

    image, label = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return lambda model: torch.nn.functional.cross_entropy(model(image), label)


VOCABULARY, TOKENS, WIDTH = 32_000, 128, 512


def transformer() -> "torch.nn.Module":
    """Return a transformer with 12 layers and a tied output layer.

    The gradients have 217 MB. The one that becomes ready last, of the embedding, has 66 MB.
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


def text_loss(batch: int) -> Loss:
    """Return the loss of a text model for random texts."""
    import torch

    text, following = torch.randint(VOCABULARY, (2, batch, TOKENS))
    return lambda model: torch.nn.functional.cross_entropy(
        model(text).flatten(0, 1), following.flatten()
    )


SMALL_LAYERS, SMALL_WIDTH = 500, 32


def many_small() -> "torch.nn.Module":
    """Return 500 linear layers of width 32: 1,000 parameters, 528,000 elements."""
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(SMALL_LAYERS):
        layer = nn.Linear(SMALL_WIDTH, SMALL_WIDTH)
        # An orthogonal matrix keeps the norm, so gradients neither vanish nor overflow.
        nn.init.orthogonal_(layer.weight)
        layers.append(layer)
    return nn.Sequential(*layers)


HUGE_WIDTH = 5000


def one_huge() -> "torch.nn.Module":
    """Return one linear layer without a bias: one parameter of 25,000,000 elements, 100 MB."""
    from torch import nn

    return nn.Linear(HUGE_WIDTH, HUGE_WIDTH, bias=False)


def vector_loss(width: int) -> Callable[[int], Loss]:
    """Return a function that returns the loss of a model of vectors of this width."""

    def loss(batch: int) -> Loss:
        import torch

        vectors, expected = torch.randn(2, batch, width)
        return lambda model: torch.nn.functional.mse_loss(model(vectors), expected)

    return loss


#: Name -> the function that makes the model, and the one that makes the loss for a batch size.
MODELS: Mapping[str, tuple[Callable[[], "torch.nn.Module"], Callable[[int], Loss]]] = {
    "resnet50": (resnet50, image_loss),
    "transformer": (transformer, text_loss),
    "vgg16": (vgg16, image_loss),
    "many-small": (many_small, vector_loss(SMALL_WIDTH)),
    "one-huge": (one_huge, vector_loss(HUGE_WIDTH)),
}
