"""Tables, options and results of checks, for all commands of `hvdkit`."""
