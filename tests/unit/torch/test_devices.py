"""Selection of a rank's GPU, with a simulated CUDA."""

import pytest


@pytest.mark.parametrize(
    ("local_rank", "gpus", "in_use", "chosen"),
    [(2, 4, False, [2]), (0, 4, False, [0]), (1, 1, False, []), (2, 4, True, [])],
    ids=["its own", "the first", "pinned by a launcher", "chosen by the script"],
)
def test_a_rank_gets_its_gpu_when_cuda_starts(hvd, local_rank, gpus, in_use, chosen):
    import torch

    from hvdkit.torch.devices import use_own_gpu

    waiting, seen = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: in_use)
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        patch.setattr(torch.cuda, "set_device", seen.append)
        # torch's list of calls that wait for the first use of CUDA, with their tracebacks.
        patch.setattr(torch.cuda, "_queued_calls", waiting)
        use_own_gpu(local_rank)
        assert seen == []
        for call, _ in waiting:
            call()
        assert seen == chosen
