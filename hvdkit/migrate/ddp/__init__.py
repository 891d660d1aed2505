"""Scripts of torch.distributed and DistributedDataParallel: what they use, and how to convert them.

A script whose model is no longer wrapped must have its optimizer wrapped, or its ranks would train
separate models. So scripts that belong together are converted completely, or not at all.
"""
