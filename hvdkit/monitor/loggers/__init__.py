"""Loggers: where a `Monitor` writes its records."""
