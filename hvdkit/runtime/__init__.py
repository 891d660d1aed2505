"""The process of a rank, from `init` to its end: Horovod, records, counters, host memory."""
