"""The command lines of `hvdkit run` and `horovodrun`."""
