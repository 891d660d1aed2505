"""`hvdkit bench`: interleaved benchmarks of allreduce and of training steps, and predictions.

Each variant (hvdkit, stock Horovod, torch.distributed, ...) is a job of its own (`jobs.Job`), with
one thread per rank. All jobs exist at the same time. They work in turns (`turns`), in an order that
is drawn for every turn, so other load on the machine affects all variants alike. The other jobs are
stopped (SIGSTOP) meanwhile, because an idle Horovod exchanges messages all the time. All ranks
begin on command, and the slowest rank counts.

A rank runs `hvdkit.bench.rank`. It connects to the runner (`control`) and executes its commands
(`worker`). Ranks are on this machine, on namespaces with limited links, or on the hosts of a
cluster (`places`). `allreduce` and `step` define the variants and what a rank does. `scale`
predicts steps on more ranks from their files.
"""
