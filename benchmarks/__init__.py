"""Interleaved benchmarks of gradient synchronisation. `scripts/bench_*` are their command lines.

Each variant is a job of its own, with one thread per rank. All jobs over one controller exist at
the same time. They do one step each, in an order that is drawn for every turn, so other load on the
machine affects all variants alike. The other jobs are stopped (SIGSTOP) meanwhile, because an idle
Horovod exchanges messages every millisecond. All ranks begin a step on command, and the slowest
rank counts. CPU time is that of all ranks and threads.

A benchmark defines its variants (`variants.Benchmark`) and a rank's step (`worker.Workload`).
`runner.measure` starts the jobs (`jobs.Job`), and `report` prints the times. Network namespaces
(`hosts`) stand for several hosts.
"""
