"""The framework-free part of all adapters: bucketing, synchronizer, wire formats, schedules.

No module of this package imports torch, tensorflow, keras or horovod.
"""
