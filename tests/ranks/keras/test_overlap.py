"""Overlap of the reduction with the backward pass, on the PyTorch backend."""

import pytest

from hvdkit.reduction.step_errors import BackwardFailed
from tests.ranks.frameworks import keras
from tests.ranks.keras.job import classifier, distributed, fit, of_every_rank, same_everywhere


def skip_on_tensorflow():
    if keras.backend.backend() != "torch":
        pytest.skip("on TensorFlow the order of operations follows from the graph")


def events_of_fit(hvd, model):
    """Train, and return the events: a bucket is sent, the last gradient is computed."""
    from hvdkit.torch.reduction.backend import TorchBackend

    events = []
    original = TorchBackend.sum

    def sum(self, *call):
        events.append("sent")
        return original(self, *call)

    first = model.layers[0].kernel.value
    first.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "sum", sum)
        fit(hvd, model)
    return events


def weights_of(model):
    return [v.numpy().tobytes().hex() for v in model.trainable_variables]


def test_buckets_are_sent_before_the_last_gradient(hvd):
    skip_on_tensorflow()
    model = classifier(distributed(hvd, 0.1, bucket_bytes=8))
    fit(hvd, model)
    events = events_of_fit(hvd, model)
    assert events[0] == "sent"
    same_everywhere([events, weights_of(model)])


@pytest.mark.parametrize("uses", ["its own train_step", "accumulation"])
def test_gradients_that_may_change_are_not_sent_early(hvd, uses):
    skip_on_tensorflow()

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x, training=True)))
            loss.backward()
            gradients = [v.value.grad for v in self.trainable_weights]
            for gradient in gradients:
                gradient.clamp_(-0.01, 0.01)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": loss}

    if uses == "accumulation":
        model = classifier(distributed(hvd, 0.1, bucket_bytes=8, accumulation_steps=2))
    else:
        keras.utils.set_random_seed(1)
        model = Own([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(distributed(hvd, 0.1, bucket_bytes=8), loss="mse")
    fit(hvd, model)
    assert events_of_fit(hvd, model)[0] == "last gradient"
    same_everywhere(weights_of(model))


class Trap:
    """A layer whose backward pass raises while it is set."""

    def __new__(cls):
        import torch

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, layer):
                ctx.layer = layer
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                if ctx.layer.set:
                    raise RuntimeError("trapped")
                return gradient, None

        class Layer(keras.layers.Layer):
            set = False

            def call(self, x):
                return Function.apply(x, self) if x.requires_grad else x

            def compute_output_shape(self, shape):
                return shape

        return Layer()


@pytest.mark.parametrize("who", ["all ranks", "one rank"])
def test_a_backward_pass_that_raises(hvd, who):
    """Buckets of the upper layer have been sent when the trap raises."""
    skip_on_tensorflow()
    keras.utils.set_random_seed(1)
    trap = Trap()
    layers = [keras.layers.Dense(4), trap, keras.layers.Dense(4), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(distributed(hvd, 0.1, bucket_bytes=8), loss="mse")
    fit(hvd, model)
    before = weights_of(model)
    trap.set = who == "all ranks" or hvd.rank() == 1
    own = f"trapped|backward pass raised on 1 of {hvd.size()} ranks"
    with pytest.raises((RuntimeError, BackwardFailed), match=own) as first:
        fit(hvd, model)
    assert ("trapped" in str(first.value)) == trap.set
    if who == "one rank" and trap.set:
        # The other ranks raise when this rank calls `fit` again.
        trap.set = False
        with pytest.raises(BackwardFailed, match="including this rank"):
            fit(hvd, model)
    trap.set = False
    of_every_rank("all have failed")
    assert weights_of(model) == before
    fit(hvd, model)
    assert same_everywhere(weights_of(model)) != before
