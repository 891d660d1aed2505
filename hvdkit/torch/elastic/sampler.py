"""`horovod.torch.elastic.sampler`, for scripts that import it by this name."""

from horovod.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
