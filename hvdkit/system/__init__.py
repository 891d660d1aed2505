"""The operating system: processes, signals, files and folders that others may have changed."""
