"""Checkpoints that survive anything: a crash-safe store, and a manager that all ranks enter.

Framework-free. An adapter describes its state as trees of tensors (`hvdkit.checkpoint.state`).
"""
