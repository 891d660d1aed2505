"""`hvdkit bench allreduce`: the time and the bandwidth of allreduces of many sizes."""
