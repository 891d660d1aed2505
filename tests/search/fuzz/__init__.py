"""Fuzzers of the parsers and the listeners of hvdkit; see `__main__`."""
