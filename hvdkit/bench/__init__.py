"""`hvdkit bench`: interleaved benchmarks of allreduce and of training steps, and predictions.

Each variant (hvdkit, stock Horovod, torch.distributed, ...) is a job of its own (`jobs.Job`), with
one thread per rank. All jobs exist at the same time. They work in turns (`turns`), in an order that
is drawn for every turn, so other load on the machine affects all variants alike. While one job
works, the other jobs are stopped (SIGSTOP), because an idle Horovod exchanges messages all the
time. All ranks begin when the runner sends a command, and the time of a job is that of its slowest
rank.

The runner is the process of `hvdkit bench`. A rank runs `hvdkit.bench.rank`. It connects to the
runner (`control`) and executes the runner's commands (`worker`). Ranks are on this machine, in
network namespaces with limited links, or on the hosts of a cluster (`places`). `allreduce` and
`step` define the variants and the work of a rank. `scale` reads the files of both, and predicts
steps on more ranks.
"""
