"""What every adapter shares: bucketing, agreement, the gradient synchronizer, schedules.

Framework-free: nothing here imports torch, tensorflow, keras or horovod.
"""
