"""The errors of rounds that cannot be used, the same on all ranks."""

from hvdkit.errors import HvdkitError
from hvdkit.reduction.step_errors import BackwardFailed, GradientsChanged, PassesDiffer
from hvdkit.torch.reduction.headers import HeaderResult


def error_of(result: HeaderResult, details: str) -> HvdkitError:
    """Return the error for the first difference that the slots show.

    Args:
        result: the sums of the slots.
        details: a text about the state of each rank.
    """
    count, slots = result.count, [slot for _, slot in result.slots]
    if failed := max(slot.failed for slot in slots):
        return BackwardFailed(
            f"the backward pass raised on {failed} of {count} ranks, so no rank can use its "
            f"gradients. {details}. Call optimizer.drop_pass() on every rank to continue."
        )
    if any(slot.present < count for slot in slots):
        return PassesDiffer(
            f"ranks have wrapped different numbers of optimizers. {details}. Call "
            f"hvd.DistributedOptimizer equally often on all ranks, then optimizer.zero_grad() to "
            f"continue."
        )
    if any(slot.busy for slot in slots):
        return PassesDiffer(
            f"the gradients of an optimizer are reduced while a backward pass in another thread "
            f"adds to them. {details}. Train in one thread of each process."
        )
    if any(slot.changed for slot in slots):
        return GradientsChanged(
            f"gradients were changed or removed while p.grad had only what this rank has added, "
            f"without its reduced part. {details}. After a pass under hvd.no_sync, call "
            f"optimizer.synchronize() on every rank before gradients are changed. A hook may "
            f"change the gradient of its own parameter in place, but not remove it, and must be "
            f"registered after hvd.DistributedOptimizer. If hvdkit's hooks were removed, for "
            f"example by a conversion of the model, call optimizer.zero_grad() before the next "
            f"pass. Call optimizer.zero_grad() to continue."
        )
    if result.same_position and not all(slot.same_content(count) for slot in slots):
        return GradientsChanged(
            f"reduced gradients differ between ranks: some ranks have changed them too early. "
            f"{details}. If a rank may make no backward pass, or only passes under hvd.no_sync, "
            f"call hvd.clip_grad_norm_(optimizer, ...) or optimizer.synchronize() on every rank "
            f"before gradients are changed. To set gradients of each rank before a pass or a step, "
            f"call optimizer.zero_grad() before. Call optimizer.zero_grad() to continue."
        )
    return PassesDiffer(
        f"ranks are not in the same step, or different parameters need gradients "
        f"(requires_grad). {details}. Give all ranks the same number of batches (hvd.join() ends "
        f"an uneven epoch). Call step(), zero_grad() and requires_grad_() on all ranks alike. Then "
        f"call optimizer.zero_grad() to continue."
    )
