"""Pack, check and unpack the gradients of a bucket inside a TensorFlow graph."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.reduction.bucketing import Bucket, ParameterSpec
from hvdkit.reduction.scalar_ops import Scalar, ScalarOps

_NARROW = (tf.float16, tf.bfloat16)

# TensorFlow aligns tensors to this many bytes. Gradients in a bucket begin at multiples of it.
_ALIGNMENT = 64


class Wire:
    """A bucket's contiguous buffer.

    hvdkit.reduction treats the buffer as modified in place. A tensor cannot change, so each
    operation sets `tensor` to a new one.

    Attributes:
        tensor: the current content, one-dimensional.
        factor: a pending factor of the content; the next collective applies it.
    """

    def __init__(self, tensor: tf.Tensor, factor: float = 1.0) -> None:
        self.tensor = tensor
        self.factor = factor


class GraphMemory:
    """`hvdkit.reduction.backend.BucketMemory` of symbolic gradients.

    Args:
        bucket: the bucket.
        specs: the specs of all gradients of the plan.
        gradients: the bucket's gradients, in its order; a sparse one is a `tf.IndexedSlices`.
    """

    def __init__(
        self, bucket: Bucket, specs: Sequence[ParameterSpec], gradients: Sequence[Any]
    ) -> None:
        self._bucket = bucket
        self._shapes = [specs[i].shape for i in bucket.parameters]
        self._sizes = [specs[i].elements for i in bucket.parameters]
        self._row = max(1, _ALIGNMENT // specs[bucket.parameters[0]].itemsize)
        self._sparse = gradients[0] if bucket.sparse_dims else None
        self._in_place: Wire | None = None
        if self._sparse is None:
            self._flat = self._concatenate(gradients)

    def _concatenate(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        if len(gradients) == 1:
            return tf.reshape(gradients[0], [-1])
        parts = []
        for gradient, size in zip(gradients, self._sizes, strict=True):
            parts.append(tf.reshape(gradient, [-1]))
            if size % self._row:
                parts.append(tf.zeros([-size % self._row], gradient.dtype))
        return tf.concat(parts, 0)

    @property
    def dtype(self) -> str:
        """TensorFlow's name for the gradients' dtype."""
        return self._bucket.dtype

    @property
    def content(self) -> tf.Tensor:
        """The gradients of a dense bucket, concatenated."""
        if self._in_place is not None:
            return _as(tf.as_dtype(self.dtype), self._in_place.tensor)
        return self._flat

    @content.setter
    def content(self, flat: tf.Tensor) -> None:
        self._flat, self._in_place = flat, None

    def gradients(self) -> list[Any]:
        """Return the current gradients, in the order of the bucket."""
        if self._sparse is not None:
            return [self._sparse]
        flat = self.content
        if len(self._sizes) == 1:
            return [tf.reshape(flat, self._shapes[0])]
        # TensorFlow slices rows of this length without a copy.
        counts = [-(-size // self._row) for size in self._sizes]
        gradients = []
        for rows, size, shape in zip(
            tf.split(tf.reshape(flat, [-1, self._row]), counts),
            self._sizes,
            self._shapes,
            strict=True,
        ):
            part = tf.reshape(rows, [-1])
            gradients.append(tf.reshape(part[:size] if size % self._row else part, shape))
        return gradients

    def set_gradients(self, gradients: Sequence[tf.Tensor]) -> None:
        """Replace the gradients."""
        dtype = tf.as_dtype(self.dtype)
        self.content = self._concatenate([tf.cast(gradient, dtype) for gradient in gradients])

    def in_place(self, factor: float) -> Wire:
        """Return the concatenated gradients, without another pass over memory."""
        flat = self._flat
        if flat.dtype.is_complex:
            # Complex numbers are added by their real and imaginary parts.
            flat = tf.reshape(tf.bitcast(flat, flat.dtype.real_dtype), [-1])
        self._in_place = Wire(flat, factor)
        return self._in_place

    def pack(self, dtype: str, factor: Scalar, keep: bool = True) -> Wire:  # noqa: ARG002
        """Cast in one pass. The factor needs another pass unless the collective applies it."""
        wanted = tf.as_dtype(dtype)
        if wanted not in _NARROW and isinstance(factor, float):
            return Wire(tf.cast(self.content, wanted), factor)
        return Wire(_scaled(self.content, factor, wanted))

    def scale(self, buffer: Wire, factor: float) -> None:
        """Multiply in the buffer's dtype."""
        buffer.tensor = buffer.tensor * scalar(factor, buffer.tensor.dtype)

    def unpack(self, buffer: Wire, factor: Scalar) -> None:
        """Cast in one pass and multiply in another."""
        self.content = _scaled(buffer.tensor, factor, tf.as_dtype(self.dtype))

    def rows(self, factor: float) -> tuple[tf.Tensor, tf.Tensor]:
        """Return indices and values."""
        assert self._sparse is not None
        values = self._sparse.values
        return self._sparse.indices, values * scalar(factor, values.dtype)

    def set_rows(self, rows: tuple[tf.Tensor, tf.Tensor]) -> None:
        """Replace the sparse gradient. Ranks may have sent rows of the same indices."""
        indices, values = rows
        shape = tf.constant(self._shapes[0], tf.int64)
        self._sparse = merged(tf.IndexedSlices(values, indices, shape))


def scalar(value: Scalar, dtype: tf.DType) -> tf.Tensor:
    """Return a scalar of `dtype`. A Python number is not rounded to float32 first."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)


def multiply(gradient: Any, factor: float) -> Any:
    """Return `gradient` times `factor`; None stays None, and sparse gradients stay sparse."""
    if gradient is None or factor == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * scalar(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * scalar(factor, gradient.dtype)


def merged(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return a sparse gradient whose rows with equal indices are added up.

    Keras 3 squares and clips a sparse gradient row by row. The result is that of the dense gradient
    only if no index is repeated.
    """
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _scaled(flat: tf.Tensor, factor: Scalar, dtype: tf.DType) -> tf.Tensor:
    """Return `flat` times `factor` in `dtype`, rounded once."""
    if isinstance(factor, float) and factor == 1.0:
        scaled = flat
    else:
        wide = tf.float64 if tf.float64 in (flat.dtype, dtype) else tf.float32
        scaled = tf.cast(flat, wide) * scalar(factor, wide)
    return tf.cast(tf.round(scaled) if dtype.is_integer else scaled, dtype)


def _as(dtype: tf.DType, flat: tf.Tensor) -> tf.Tensor:
    if not dtype.is_complex:
        return flat
    return tf.bitcast(tf.reshape(flat, [-1, 2]), dtype)


def abs_max(buffer: Wire) -> tf.Tensor:
    """Return the absolute maximum as float64; not finite if an element is not finite."""
    bits = {2: tf.int16, 4: tf.int32, 8: tf.int64}[buffer.tensor.dtype.size]
    # Positive floats are ordered like the integers of the same bits, with infinity above all
    # numbers and NaN above infinity. A maximum of integers finds NaN; a maximum of floats may not.
    positive = tf.bitwise.bitwise_and(tf.bitcast(buffer.tensor, bits), bits.max)
    largest = tf.maximum(tf.reduce_max(positive), tf.constant(0, bits))
    magnitude = tf.cast(tf.bitcast(largest, buffer.tensor.dtype), tf.float64)
    return magnitude * abs(buffer.factor)


class GraphOps(ScalarOps):
    """Operations on bool, int32 and float64 scalars of a graph."""

    where = staticmethod(tf.where)
    logical_and = staticmethod(tf.logical_and)
    logical_not = staticmethod(tf.logical_not)
    minimum = staticmethod(tf.minimum)
    is_finite = staticmethod(tf.math.is_finite)

    def largest(self, values: Sequence[Scalar]) -> Scalar:
        """Return the largest of some int32 scalars."""
        return tf.reduce_max(tf.stack(values))

    def exponent(self, x: Scalar) -> Scalar:
        """Return the exponent, read from the bits of the float64 `x`."""
        bits = tf.bitwise.right_shift(tf.bitcast(x, tf.int64), tf.constant(52, tf.int64))
        return tf.cast(bits, tf.int32) - 1022

    def power_of_two(self, exponent: Scalar) -> Scalar:
        """Return a float64 with the bits of 2^exponent."""
        bits = tf.cast(exponent, tf.int64) + 1023
        return tf.bitcast(tf.bitwise.left_shift(bits, tf.constant(52, tf.int64)), tf.float64)
