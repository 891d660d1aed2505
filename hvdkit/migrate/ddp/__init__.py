"""Scripts of torch.distributed and DistributedDataParallel: what they use, and how to convert them.

A script whose model is no longer wrapped must have its optimizer wrapped, or its ranks would train
separate models. So the models, optimizers and starts of scripts that belong together are all
converted, or none of them. Other lines may be left to the user.
"""
