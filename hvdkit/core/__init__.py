"""The framework-free part of all adapters: bucketing, synchronizer, wire formats, schedules.

No module of this package imports torch, tensorflow, keras or horovod. An adapter implements the
protocols of `backend` and `collectives`, and calls `synchronizer.Synchronizer` with its gradients.
"""
