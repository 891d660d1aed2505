"""The code that all adapters share: bucketing, agreement, the gradient synchronizer, schedules.

Framework-free: nothing here imports torch, tensorflow, keras or horovod.
"""
