"""The models of `hvdkit bench step`, in Keras. The shapes are those of `torch_models`.

`MODELS` has two functions for each name. The first makes the model. The second takes a batch size
and a rank, and returns inputs and targets.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from hvdkit.bench.step.torch_models import (
    HUGE_WIDTH,
    SMALL_LAYERS,
    SMALL_WIDTH,
    TOKENS,
    VOCABULARY,
    WIDTH,
)

_HEADS, _LAYERS = 8, 12


def resnet50() -> "keras.Model":
    """Return ResNet-50 as in torchvision: 161 trainable variables, 25,557,032 elements."""

    def convolution(x: Any, channels: int, width: int, stride: int = 1) -> Any:
        # Padding as in PyTorch; TensorFlow's "same" depends on the stride.
        x = layers.ZeroPadding2D(width // 2)(x) if width > 1 else x
        x = layers.Conv2D(channels, width, stride, use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    def bottleneck(x: Any, width: int, stride: int) -> Any:
        branch = layers.ReLU()(convolution(x, width, 1))
        branch = layers.ReLU()(convolution(branch, width, 3, stride))
        branch = convolution(branch, 4 * width, 1)
        if x.shape[-1] != 4 * width:
            x = convolution(x, 4 * width, 1, stride)
        return layers.ReLU()(branch + x)

    image = keras.Input((224, 224, 3))
    x = layers.ReLU()(convolution(image, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            x = bottleneck(x, 64 << stage, 2 if stage and not block else 1)
    return keras.Model(image, layers.Dense(1000)(layers.GlobalAveragePooling2D()(x)))


def vgg16() -> "keras.Model":
    """Return VGG-16 without dropout: 32 variables, 138,357,544 elements."""
    x = image = keras.Input((224, 224, 3))
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dense(4096, activation="relu")(x)
    return keras.Model(image, layers.Dense(1000)(x))


class _Tied(layers.Layer):
    """Scores of the vocabulary, with the matrix of the embedding."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self._embedding = embedding

    def call(self, hidden: Any) -> Any:
        return keras.ops.matmul(hidden, keras.ops.transpose(self._embedding.embeddings))


class _Positions(layers.Layer):
    """Add a vector for each position."""

    def build(self, shape: Any) -> None:
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, hidden: Any) -> Any:
        return hidden + self.vectors


def transformer() -> "keras.Model":
    """Return a transformer with 12 layers and a tied output layer."""
    text = keras.Input((TOKENS,), dtype="int32")
    embedding = layers.Embedding(VOCABULARY, WIDTH)
    x = _Positions()(embedding(text))
    for _ in range(_LAYERS):
        normal = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.MultiHeadAttention(_HEADS, WIDTH // _HEADS)(normal, normal)
        normal = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normal))
    return keras.Model(text, _Tied(embedding)(layers.LayerNormalization(epsilon=1e-5)(x)))


def many_small() -> "keras.Model":
    """Return 500 dense layers of width 32: 1,000 variables, 528,000 elements."""
    x = vectors = keras.Input((SMALL_WIDTH,))
    for _ in range(SMALL_LAYERS):
        x = layers.Dense(SMALL_WIDTH, kernel_initializer="orthogonal")(x)
    return keras.Model(vectors, x)


def one_huge() -> "keras.Model":
    """Return one dense layer without a bias: one variable of 25,000,000 elements, 100 MB."""
    vectors = keras.Input((HUGE_WIDTH,))
    return keras.Model(vectors, layers.Dense(HUGE_WIDTH, use_bias=False)(vectors))


Data = Callable[[int, int], tuple[Any, Any]]


def images(batch: int, rank: int) -> tuple[Any, Any]:
    """Return random images and labels."""
    image = tf.random.stateless_normal((batch, 224, 224, 3), (1, rank))
    label = tf.random.stateless_uniform((batch,), (2, rank), maxval=1000, dtype=tf.int32)
    return image, label


def texts(batch: int, rank: int) -> tuple[Any, Any]:
    """Return random texts, and random following tokens."""
    shape = (2, batch, TOKENS)
    text = tf.random.stateless_uniform(shape, (1, rank), maxval=VOCABULARY, dtype=tf.int32)
    return text[0], text[1]


def vectors_of(width: int) -> Data:
    """Return a function that returns random vectors, and random results."""

    def vectors(batch: int, rank: int) -> tuple[Any, Any]:
        both = tf.random.stateless_normal((2, batch, width), (1, rank))
        return both[0], both[1]

    return vectors


MODELS: Mapping[str, tuple[Callable[[], "keras.Model"], Data]] = {
    "resnet50": (resnet50, images),
    "transformer": (transformer, texts),
    "vgg16": (vgg16, images),
    "many-small": (many_small, vectors_of(SMALL_WIDTH)),
    "one-huge": (one_huge, vectors_of(HUGE_WIDTH)),
}


def loss(name: str) -> Any:
    """Return the Keras loss of the model with this name in `MODELS`."""
    if name in ("many-small", "one-huge"):
        return keras.losses.MeanSquaredError()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
