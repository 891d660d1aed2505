#!/bin/bash
#SBATCH --job-name=$name
$partition
$account
#SBATCH --nodes=$nodes
# A task is a rank: one per GPU where there are GPUs.
#SBATCH --ntasks-per-node=$tasks
# Cores of each rank, for computing, data loading and communication. The default of 1 is
# rarely enough. OMP_NUM_THREADS is set to this number.
$cpus
# Every rank sees all GPUs of its node; hvd.init() selects that of its local rank.
$gpus
#SBATCH --time=$time
# %x is the job's name, %j its number. A job that resumes appends to its file.
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# Slurm may put the job back into the queue after a preemption or the failure of a node.
#SBATCH --requeue
# Slurm sends SIGUSR1 $grace s (up to a minute more) before the time limit. With `B:`, it sends the
# signal to this script only. The script forwards it to hvdkit, and hvdkit to the ranks' main
# processes. Without `B:`, all processes get it, and helpers (data loaders) and mpirun may die.
#SBATCH --signal=B:USR1@$grace

# sbatch forwards your environment. If hvdkit is in another environment:
# source /path/to/env/bin/activate

# hvdkit runs in the background, because a shell handles no signal before a foreground command has
# ended. `scancel` and preemption send SIGTERM.
trap 'again=yes; kill -USR1 "$$!"' USR1
trap 'again=yes; kill -TERM "$$!"' TERM
hvdkit run --stop-grace $grace $command &
again=yes
status=127
while [ -n "$$again" ]; do
    again=
    wait "$$!"
    found=$$?
    # 127: hvdkit had ended before this wait, because a signal came at the very end.
    [ "$$found" -eq 127 ] || status=$$found
done

# $resumable: the job has saved, or has lost a node. The same command resumes, if your script does
# so (with --resume or the like).
# A cancelled job is not RUNNING, and is not requeued. In a job array, SLURM_JOB_ID of one task is
# also the number of the whole array.
job=$${SLURM_ARRAY_TASK_ID:+$${SLURM_ARRAY_JOB_ID}_$$SLURM_ARRAY_TASK_ID}
job=$${job:-$$SLURM_JOB_ID}
if [ "$$status" -eq $resumable ] &&
    [ "$$(squeue --noheader --jobs="$$job" --format=%T)" = RUNNING ]; then
    echo "requeueing (restart $$(($${SLURM_RESTART_COUNT:-0} + 1)))"
    scontrol requeue "$$job"
fi
exit "$$status"
