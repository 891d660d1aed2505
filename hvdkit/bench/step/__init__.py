"""`hvdkit bench step`: the time of a training step, and what the network adds to it."""
