"""Samplers, equal batches and positions in data for PyTorch."""
