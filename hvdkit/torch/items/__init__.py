"""The stateful items of a PyTorch training; see `hvdkit.checkpoint.state`.

model, optimizer, state_dict, reduction     the same on all ranks: rank 0's state is saved
randomness, statistics                      a state of its own on each rank
tensors, trees, compiled                    helpers of these modules: tensors and their names
"""
