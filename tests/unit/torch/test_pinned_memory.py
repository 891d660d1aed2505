"""Host memory for copies from a GPU, with a simulated CUDA."""

import pytest


class Runtime:
    """A simulated CUDA runtime that records calls and pins nothing."""

    def __init__(self, status):
        self.pinned = {}
        self._status = status

    def cudaHostRegister(self, address, nbytes, flags):
        if not self._status:
            self.pinned[address] = nbytes
        return self._status

    def cudaHostUnregister(self, address):
        del self.pinned[address]


@pytest.mark.parametrize("status", [0, 2])
def test_memory_is_pinned_until_it_is_freed(hvd, status):
    import torch

    from hvdkit.torch import devices

    runtime = Runtime(status)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        memory = devices.host_memory(1000)
    assert (memory.dtype, memory.shape) == ("uint8", (1000,))
    assert runtime.pinned == ({} if status else {memory.ctypes.data: 1000})
    part = memory[:10]
    del memory
    assert len(runtime.pinned) == (status == 0)
    del part
    assert runtime.pinned == {}
