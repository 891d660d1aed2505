"""Threads that stand for ranks."""
