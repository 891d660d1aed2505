"""The layers of known models: their parameters and the work of their passes.

A prediction needs the number of elements of each gradient, and the multiply-adds of each layer. The
time of the backward pass is divided among the layers in proportion to their multiply-adds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise


@dataclass(frozen=True)
class Layer:
    """A layer of a model.

    Attributes:
        elements: the number of elements of each parameter.
        work: the multiply-adds of the forward pass of one sample. The backward pass has twice as
            many.
    """

    elements: tuple[int, ...]
    work: float = 0.0


def _linear(inputs: int, outputs: int, rows: int = 1) -> Layer:
    return Layer((inputs * outputs, outputs), rows * inputs * outputs)


def _convolution(inputs: int, outputs: int, area: int, pixels: int) -> list[Layer]:
    """Return a convolution without a bias, and its batch normalization."""
    weights = inputs * outputs * area
    return [Layer((weights,), weights * pixels), Layer((outputs, outputs))]


def resnet(blocks: Sequence[int]) -> list[Layer]:
    """Return a ResNet with bottlenecks for images of 224 x 224 (He et al., arXiv 1512.03385).

    The stride of a block is that of its 3 x 3 convolution, as in torchvision.

    Args:
        blocks: the number of blocks of each stage.
    """
    layers = _convolution(3, 64, 49, 112 * 112)
    channels, side = 64, 56
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            before = side
            if stage and not block:
                side //= 2
            layers += _convolution(channels, width, 1, before * before)
            layers += _convolution(width, width, 9, side * side)
            layers += _convolution(width, 4 * width, 1, side * side)
            if channels != 4 * width:
                layers += _convolution(channels, 4 * width, 1, side * side)
            channels = 4 * width
    return [*layers, _linear(channels, 1000)]


def vgg16() -> list[Layer]:
    """Return VGG-16 for images of 224 x 224 (Simonyan and Zisserman, arXiv 1409.1556)."""
    layers = []
    channels, side = 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            weights = 9 * channels * width
            layers.append(Layer((weights, width), weights * side * side))
            channels = width
        side //= 2
    return [*layers, _linear(512 * 7 * 7, 4096), _linear(4096, 4096), _linear(4096, 1000)]


# A chain of convolutions of Inception V3: (output channels, height x width of the kernel) of each.
_Branch = Sequence[tuple[int, int]]


def inception3() -> list[Layer]:
    """Return Inception V3 for images of 299 x 299, without the auxiliary classifier.

    Szegedy et al., arXiv 1512.00567.
    """
    layers: list[Layer] = []

    def branches(inputs: int, side: int, *found: _Branch) -> int:
        """Add branches whose outputs have `side`. Return the sum of their output channels."""
        for branch in found:
            chain = [inputs, *(width for width, _ in branch)]
            for (before, after), (_, area) in zip(pairwise(chain), branch, strict=True):
                layers.extend(_convolution(before, after, area, side * side))
        return sum(branch[-1][0] for branch in found)

    for before, after, area, side in (
        (3, 32, 9, 149),
        (32, 32, 9, 147),
        (32, 64, 9, 147),
        (64, 80, 1, 73),
        (80, 192, 9, 71),
    ):
        layers += _convolution(before, after, area, side * side)
    channels = 192
    for pooled in (32, 64, 64):
        double = [(64, 1), (96, 9), (96, 9)]
        channels = branches(channels, 35, [(64, 1)], [(48, 1), (64, 25)], double, [(pooled, 1)])
    # The last convolution of a branch halves the image.
    branches(channels, 35, [(64, 1), (96, 9)])
    channels += branches(channels, 17, [(384, 9)]) + branches(96, 17, [(96, 9)])
    for width in (128, 160, 160, 192):
        single = [(width, 1), (width, 7), (192, 7)]
        double = [(width, 1), (width, 7), (width, 7), (width, 7), (192, 7)]
        channels = branches(channels, 17, [(192, 1)], single, double, [(192, 1)])
    branches(channels, 17, [(192, 1)], [(192, 1), (192, 7), (192, 7)])
    channels += branches(192, 8, [(320, 9)]) + branches(192, 8, [(192, 9)])
    for _ in range(2):
        inputs = channels
        channels = branches(inputs, 8, [(320, 1)])
        for stem in ([(384, 1)], [(448, 1), (384, 9)]):
            width = branches(inputs, 8, stem)
            channels += branches(width, 8, [(384, 3)], [(384, 3)])
        channels += branches(inputs, 8, [(192, 1)])
    return [*layers, _linear(channels, 1000)]


def bert(depth: int, width: int, tokens: int = 64, vocabulary: int = 30528) -> list[Layer]:
    """Return BERT with the heads of its pre-training (Devlin et al., arXiv 1810.04805).

    The output layer shares the weights of the word embedding, whose gradient is the last one to
    become ready.

    Args:
        depth: the number of transformer layers.
        width: the width of a layer.
        tokens: the length of a text.
        vocabulary: the number of words, a multiple of 8.
    """
    norm = Layer((width, width))
    layers = [Layer((vocabulary * width,)), Layer((512 * width,)), Layer((2 * width,)), norm]
    layers += depth * _transformer_layer(width, tokens)
    layers += [_linear(width, width), _linear(width, width, tokens), norm]
    output = Layer((vocabulary,), tokens * width * vocabulary)
    return [*layers, output, _linear(width, 2)]


def _transformer_layer(width: int, tokens: int, joined: bool = False) -> list[Layer]:
    """Return attention and the two linear layers after it, four times as wide.

    Args:
        width: the width of the layer.
        tokens: the length of a text.
        joined: whether queries, keys and values have one matrix.
    """
    square = _linear(width, width, tokens)
    inputs = [_linear(width, 3 * width, tokens)] if joined else [square, square, square]
    scores = Layer((), 2 * tokens * tokens * width)
    norm = Layer((width, width))
    attention = [*inputs, scores, square, norm]
    return [*attention, _linear(width, 4 * width, tokens), _linear(4 * width, width, tokens), norm]


def transformer() -> list[Layer]:
    """Return the transformer of `hvdkit bench step`, with a tied output layer."""
    width, tokens, vocabulary = 512, 128, 32_000
    layers = [Layer((vocabulary * width,)), Layer((tokens * width,))]
    layers += 12 * _transformer_layer(width, tokens, joined=True)
    return [*layers, Layer((width, width)), Layer((), tokens * width * vocabulary)]


#: The models that can be named: their layers in the order of the forward pass.
MODELS: Mapping[str, Callable[[], list[Layer]]] = {
    "resnet50": partial(resnet, (3, 4, 6, 3)),
    "resnet101": partial(resnet, (3, 4, 23, 3)),
    "resnet152": partial(resnet, (3, 8, 36, 3)),
    "vgg16": vgg16,
    "inception3": inception3,
    "bert-base": partial(bert, 12, 768),
    "bert-large": partial(bert, 24, 1024),
    "transformer": transformer,
    "many-small": lambda: 500 * [_linear(32, 32)],
    "one-huge": lambda: [Layer((5000 * 5000,), 5000 * 5000)],
}
