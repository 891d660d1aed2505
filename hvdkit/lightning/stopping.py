"""Stop the training of a Trainer on SIGTERM and SIGUSR1, on all ranks after the same batch."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

import hvdkit.torch as hvd


class CommonStop(pl.Callback):
    """After each batch and epoch, find out whether a rank got a stop signal. Then all ranks stop.

    Lightning alone stops a rank after the batch in which the rank got the signal. The other ranks
    may be in the batch before or after it, and would wait for this rank. A small sum for each batch
    prevents this.

    In `validate`, `test` and `predict`, Lightning handles SIGTERM itself.
    """

    def __init__(self) -> None:
        self._asked = False

    def on_train_start(self, trainer: "pl.Trainer", pl_module: Any) -> None:  # noqa: ARG002
        """Replace Lightning's part of the handler of SIGTERM, and handle SIGUSR1 in the same way.

        `hvdkit run` forwards SIGUSR1, which batch systems send before a time limit. By default, it
        kills the process. Lightning restores the handlers at the end of the training.
        """
        connector = trainer._signal_connector
        self._asked, connector.received_sigterm = connector.received_sigterm, False
        handler = signal.getsignal(signal.SIGTERM)
        if not isinstance(handler, _HandlersCompose):
            return  # Lightning has no handlers in other threads
        handler.signal_handlers = [
            self._on_signal if each == connector._sigterm_notifier_fn else each
            for each in handler.signal_handlers
        ]
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._asked = True

    def on_train_batch_end(self, trainer: "pl.Trainer", *args: Any) -> None:  # noqa: ARG002
        """Let Lightning stop on every rank if one got a signal."""
        self._let_stop(trainer)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: Any) -> None:  # noqa: ARG002
        """Let Lightning stop after the last epoch too, if the signal came in its validation."""
        self._let_stop(trainer)

    def _let_stop(self, trainer: "pl.Trainer") -> None:
        connector = trainer._signal_connector
        # A handler of the script may have replaced ours, and may call Lightning's.
        own = self._asked or connector.received_sigterm
        asked = hvd.allreduce(
            torch.tensor([int(own)], device="cpu"), op=hvd.Sum, name="lightning.stop"
        )
        connector.received_sigterm = bool(asked.item())
