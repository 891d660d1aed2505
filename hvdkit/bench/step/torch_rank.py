"""A rank of a step benchmark in PyTorch."""

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hvdkit.bench import torch_gloo
from hvdkit.bench.step.torch_models import MODELS
from hvdkit.bench.step.variants import ALONE, DDP, HVDKIT, KERAS_OPTIMIZER, SINGLE, Variant
from hvdkit.bench.worker import Workload, init_checked


def build(spec: Mapping[str, Any]) -> Workload:
    """Return the work of this rank."""
    return TorchStep(spec)


@dataclass(frozen=True)
class Wrapped:
    """A model and an optimizer that reduce gradients.

    Attributes:
        module: called for the forward pass.
        optimizer: called for the update.
        backward: called with a loss, and whether this is the last backward pass of the step. The
            last pass also reduces the gradients.
        accumulating: the context of all passes of a step except the last.
        updating: the context of `optimizer.step()`.
    """

    module: Any
    optimizer: Any
    backward: Callable[[Any, bool], None]
    accumulating: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    updating: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


class Framework:
    """The library of a variant: connects the ranks and wraps the optimizer."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self.variant = Variant(*spec["variant"])
        self.rank: int = spec["rank"]
        self._hvd: Any = None
        if self.variant.optimizer == DDP:
            torch_gloo.connect(spec)
        elif self.variant.reduces:
            ours = self.variant.optimizer in (*HVDKIT, KERAS_OPTIMIZER)
            adapter = "torch"
            if self.variant.optimizer == KERAS_OPTIMIZER:
                os.environ["KERAS_BACKEND"] = adapter
                adapter = "keras"
            hvd = importlib.import_module(f"{'hvdkit' if ours else 'horovod'}.{adapter}")
            init_checked(spec, hvd)
            self._hvd = hvd

    def wrap(
        self, model: torch.nn.Module, plain: torch.optim.Optimizer, passes: int = 1
    ) -> Wrapped:
        """Wrap a model and an optimizer.

        Args:
            model: the model.
            plain: its optimizer.
            passes: the number of backward passes of a step.
        """
        variant = self.variant
        if variant.optimizer == DDP:
            return self._wrap_ddp(model, plain)
        if variant.optimizer in (ALONE, SINGLE):
            return plain_loop(model, plain)
        if variant.optimizer == KERAS_OPTIMIZER:
            return Wrapped(model, plain, self._keras_backward(model))
        settings: dict[str, Any] = {"backward_passes_per_step": passes}
        if variant.optimizer in HVDKIT:
            if variant.wire != "fp32":
                settings["compression"] = variant.wire
            if self._spec["bucket_bytes"]:
                settings["bucket_bytes"] = self._spec["bucket_bytes"]
        elif variant.wire == "fp16":
            settings["compression"] = self._hvd.Compression.fp16
        named = model.named_parameters()
        wrapped = self._hvd.DistributedOptimizer(plain, named_parameters=named, **settings)

        def backward(loss: torch.Tensor, last: bool) -> None:
            loss.backward()
            if last:
                wrapped.synchronize()

        return Wrapped(model, wrapped, backward, updating=wrapped.skip_synchronize)

    def _wrap_ddp(self, model: torch.nn.Module, plain: torch.optim.Optimizer) -> Wrapped:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        if self.variant.wire == "powersgd":
            # One bucket: with several, the hook's collectives over Gloo are mixed up between ranks.
            module = DistributedDataParallel(model, bucket_cap_mb=100_000)
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2
            )
            module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            module = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if self.variant.wire == "fp16":
                module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return Wrapped(module, plain, _backward, module.no_sync)

    def _keras_backward(self, model: torch.nn.Module) -> Callable[[Any, bool], None]:
        import keras

        from hvdkit.keras.distribution import distribution_of

        class Reduce(keras.optimizers.Optimizer):
            """An optimizer that does not update: only the reduction is measured."""

            def update_step(self, *_: Any) -> None:
                pass

        holder = keras.layers.TorchModuleWrapper(model)
        compression = "none" if self.variant.wire == "fp32" else self.variant.wire
        optimizer = self._hvd.DistributedOptimizer(Reduce(1e-5), compression=compression)
        distribution = distribution_of(optimizer)
        assert distribution is not None

        def backward(loss: torch.Tensor, last: bool) -> None:  # noqa: ARG001
            # As in Keras's train_step.
            with distribution.train_step_of(holder):
                optimizer.scale_loss(loss).backward()
                weights = holder.trainable_weights
                optimizer.apply([v.value.grad for v in weights], weights)

        return backward

    def close(self) -> None:
        """Leave the job."""
        if self._hvd is not None:
            self._hvd.shutdown()
        elif self.variant.optimizer == DDP:
            import torch.distributed as dist

            dist.destroy_process_group()


def _backward(loss: torch.Tensor, last: bool) -> None:  # noqa: ARG001
    loss.backward()


def plain_loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    """Return the model and the optimizer without reduction."""
    return Wrapped(model, optimizer, _backward)


class TorchStep:
    """A `worker.Workload`: training steps of a model, or their backward passes alone."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._framework = Framework(spec)
        make_model, make_loss = MODELS[spec["model"]]
        # The same model on all ranks, with different data.
        torch.manual_seed(0)
        model = make_model()
        torch.manual_seed(1 + self._framework.rank)
        self._loss_of = make_loss(spec["batch"])
        self._parameters = list(model.parameters())
        self._passes: int = spec["accumulate"]
        self._whole_step = spec["part"] == "step"
        # The learning rate is tiny, so that the loss stays large. The gradients of a loss near 0
        # may be denormal numbers, with which CPUs are slow.
        plain = torch.optim.SGD(self._parameters, lr=1e-5)
        self._wrapped = self._framework.wrap(model, plain, self._passes)

    def facts(self) -> dict[str, Any]:
        """Return the number and the bytes of the gradients."""
        size = sum(p.numel() * p.element_size() for p in self._parameters)
        return {"parameters": len(self._parameters), "bytes": size}

    def answer(self, command: str, message: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Make a step: `first` returns the norm of the gradients, `step` the times."""
        if command == "first":
            self._accumulate()
            self._reduce(self._loss_of(self._wrapped.module))
            gradients = [p.grad.double() for p in self._parameters if p.grad is not None]
            norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
            self._update()
            return {"norm": norm}
        if self._whole_step:
            with _measured() as times:
                self._accumulate()
                self._reduce(self._loss_of(self._wrapped.module))
                self._update()
        else:
            self._accumulate()
            loss = self._loss_of(self._wrapped.module)
            with _measured() as times:
                self._reduce(loss)
            del loss
            self._update()
        return times

    def _accumulate(self) -> None:
        for _ in range(self._passes - 1):
            with self._wrapped.accumulating():
                self._wrapped.backward(self._loss_of(self._wrapped.module), False)

    def _reduce(self, loss: Any) -> None:
        self._wrapped.backward(loss, True)

    def _update(self) -> None:
        with self._wrapped.updating():
            self._wrapped.optimizer.step()
        self._wrapped.optimizer.zero_grad()

    def close(self) -> None:
        """Leave the job."""
        self._framework.close()


@contextlib.contextmanager
def _measured() -> Iterator[dict[str, float]]:
    """Measure the seconds, and the CPU seconds of all threads, until the end of the context."""
    times: dict[str, float] = {}
    began, cpu_began = time.perf_counter(), time.process_time()
    yield times
    times["seconds"] = time.perf_counter() - began
    times["cpu"] = time.process_time() - cpu_began
