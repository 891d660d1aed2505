"""The agent of a host, which starts and watches its ranks."""
