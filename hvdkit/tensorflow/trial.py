"""A trial of `hvdkit tune` with the first gradient tape of the script; see `training.trial`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.training.trial import BatchCount, TrialPlan, noted_reduction


class TapeTrial:
    """Counts the reductions of one tape, eagerly or in a graph, and ends the script.

    Args:
        plan: the settings of the trial.
        rank: this rank.
    """

    def __init__(self, plan: TrialPlan, rank: int) -> None:
        self._count = BatchCount(plan, rank)
        self._reported = False

    def after_reduction(self, gradients: Sequence[Any]) -> list[Any]:
        """Count a reduction, and return its gradients, which a graph needs to count.

        Args:
            gradients: the reduced gradients; None if missing.

        Raises:
            SystemExit: the trial is over, and this is no graph.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        if tf.executing_eagerly():
            if self._add():
                raise SystemExit(0)
            return list(gradients)
        caller = threading.get_ident()

        @tf.autograph.experimental.do_not_convert
        def add() -> int:
            if self._add():
                # A graph would change SystemExit to an error of TensorFlow. The thread that runs
                # the graph raises it as soon as the graph ends.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(caller), ctypes.py_object(SystemExit)
                )
            return 0

        with tf.control_dependencies(tf.nest.flatten(present, expand_composites=True)):
            counted = tf.py_function(add, [], tf.int32)
        with tf.control_dependencies([counted]):
            return [
                None
                if gradient is None
                else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                for gradient in gradients
            ]

    def _add(self) -> bool:
        """Count a reduction. Return whether it was the last one."""
        if self._reported:
            return False  # a loop in a graph continues until its end
        self._count.add()
        if self._count.over and (noted := noted_reduction()) is not None:
            self._count.report(*noted)
            self._reported = True
        return self._reported


def static_bytes(gradients: Sequence[Any]) -> int:
    """Return the size of dense gradients in bytes. Others may be sparse, or None."""
    return sum(
        int(gradient.shape.num_elements() or 0) * int(gradient.dtype.size)
        for gradient in gradients
        if gradient is not None and not isinstance(gradient, tf.IndexedSlices)
    )
