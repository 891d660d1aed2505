"""Gradients of collectives are those of one process that has the tensors of all ranks."""

import pytest
import torch

from tests.ranks.collective_cases import Case, search

IN_PLACE = ("allreduce", "broadcast", "grouped_allreduce")


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def call(hvd, case: Case, tensors, process_set):
    """Make the call of a case; return the list of its outputs."""
    options = {"name": case.name, "process_set": process_set} | case.options(hvd)
    function = getattr(hvd, case.collective)
    if case.collective in IN_PLACE and case.seed % 3 == 0:
        function = getattr(hvd, case.collective + "_")
        tensors = [x + 0 for x in tensors]
    if case.collective.startswith("grouped_"):
        return list(function(tensors, **options))
    if case.collective == "broadcast":
        return [function(tensors[0], case.root, **options)]
    if case.collective == "alltoall":
        if case.splits is None:
            return [function(tensors[0], **options)]
        own = case.splits[case.members.index(hvd.rank())]
        return [function(tensors[0], torch.tensor(own, dtype=torch.int32), **options)[0]]
    return [function(tensors[0], **options)]


def defined(case: Case, tensors):
    """Return what the call of a case is defined as, for each member.

    Args:
        tensors: the same tensor of each member.
    """
    kind = case.collective.removeprefix("grouped_")
    n = case.size
    if kind == "broadcast":
        return [tensors[case.members.index(case.root)]] * n
    if kind in ("allgather", "gather_for_loss"):
        return [torch.cat([torch.atleast_1d(x) for x in tensors])] * n
    if kind == "alltoall":
        splits = case.splits or [[len(x) // n] * n for x in tensors]
        parts = [x.split(rows) for x, rows in zip(tensors, splits, strict=True)]
        return [torch.cat([part[i] for part in parts]) for i in range(n)]
    stacked = torch.stack(list(tensors)) * case.prescale
    reduced = (
        case.postscale
        * {
            "Sum": lambda: stacked.sum(0),
            "Average": lambda: stacked.mean(0),
            "Max": lambda: stacked.amax(0),
            "Min": lambda: stacked.amin(0),
            "Product": lambda: stacked.prod(0),
        }[case.op]()
    )
    return [reduced] * n if kind == "allreduce" else reduced.split(case.rows(len(reduced)))


def loss_of(case: Case, member, inputs, outputs):
    """The loss of a member. The inputs are also used without the collective."""
    loss = torch.zeros((), dtype=torch.float64)
    for k, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
        weights = torch.from_numpy(case.weights(member, k, y.shape))
        # The gradient of a bare sum is an expanded tensor.
        loss = loss + (weights * y).sum() + y.sum() + (y * y).sum() + (x * x).sum()
    return loss


def backward(case: Case, members, losses, leaves):
    """Compute the gradients of `leaves`, or of a function of their gradients."""
    if case.second:
        every = [x for tensors in leaves for x in tensors]
        gradients = iter(torch.autograd.grad(sum(losses), every, create_graph=True))
        losses = [
            (g * torch.from_numpy(case.weights(member, 10 + k, g.shape))).sum()
            for member, tensors in zip(members, leaves, strict=True)
            for k, (_, g) in enumerate(zip(tensors, gradients, strict=False))
        ]
    sum(losses).backward()
    return [[x.grad for x in tensors] for tensors in leaves]


def expected(case: Case):
    leaves = [[torch.from_numpy(x).requires_grad_() for x in own] for own in case.inputs()]
    entered = [[x * x + x for x in own] for own in leaves]
    by_tensor = [defined(case, each) for each in zip(*entered, strict=True)]
    outputs = [[Scaled.apply(y[i], case.factor) for y in by_tensor] for i in range(case.size)]
    members = range(case.size)
    losses = [loss_of(case, i, entered[i], outputs[i]) for i in members]
    return outputs, backward(case, members, losses, leaves)


def check(hvd, case: Case, process_set):
    member = case.members.index(hvd.rank())
    leaves = [torch.from_numpy(x).requires_grad_() for x in case.inputs()[member]]
    entered = [x * x + x for x in leaves]
    given = [
        x.mT.contiguous().mT if case.transposed[member] and x.dim() > 1 else x for x in entered
    ]
    outputs = call(hvd, case, given, process_set)
    found = backward(case, [member], [loss_of(case, member, entered, outputs)], [leaves])[0]
    values, gradients = expected(case)
    for k, (y, gradient) in enumerate(zip(outputs, found, strict=True)):
        torch.testing.assert_close(y, values[member][k])
        torch.testing.assert_close(gradient, gradients[member][k])


def test_drawn_calls(hvd):
    search(hvd, range(100), check)


@pytest.mark.long
def test_many_drawn_calls(hvd):
    search(hvd, range(1000, 2000), check)


def test_a_residual_beside_a_reducescatter(hvd):
    scatters = (
        lambda x: hvd.reducescatter(x, op=hvd.Sum, name="one"),
        lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum, name="group")[0],
    )
    for scatter in scatters:
        u = torch.ones(2, 3, requires_grad=True)
        x = torch.ones(2 * hvd.size(), 3, requires_grad=True)
        ((u * 1 + scatter(x)) * 5).sum().backward()
        assert torch.equal(u.grad, torch.full((2, 3), 5.0))


WRITERS = {
    "allreduce_": lambda hvd, x: hvd.allreduce_(x, name="one"),
    "allreduce_async_": lambda hvd, x: hvd.synchronize(hvd.allreduce_async_(x, name="one")),
    "broadcast_": lambda hvd, x: hvd.broadcast_(x, 0, name="one"),
    "grouped_allreduce_": lambda hvd, x: hvd.grouped_allreduce_([x], name="one"),
    "broadcast_parameters": lambda hvd, x: hvd.broadcast_parameters([x], root_rank=0),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_tensor_that_the_forward_pass_has_saved_is_not_overwritten_unnoticed(hvd, writer):
    for leaf in (False, True):
        x = torch.full((2,), hvd.rank() + 1.0, requires_grad=True)
        saved = x if leaf else x * 1
        loss = (saved * saved).sum()
        WRITERS[writer](hvd, saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_infinite_gradient_of_a_broadcast(hvd):
    x = torch.ones(3, requires_grad=True)
    (hvd.broadcast(x, 1, name="infinite") * float("inf")).sum().backward()
    assert x.grad.tolist() == [float("inf") if hvd.rank() == 1 else 0.0] * 3


def test_adasum_has_no_gradient(hvd):
    if not hvd.mpi_enabled():
        return  # Gloo has no Adasum.
    x = torch.ones(3, requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Adasum, name="adasum")
    with pytest.raises(NotImplementedError, match="Adasum.*has no gradient: expected Average"):
        y.sum().backward()
