"""The Horovod underneath: fetch, fix, build, prove, cache, install and describe it."""
