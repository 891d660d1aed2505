"""The engine: download Horovod, patch, build, test, cache, install and describe it."""
