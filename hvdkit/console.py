"""The console on which commands of `hvdkit` print tables and colours."""

import rich.console


class Console(rich.console.Console):
    """A console that raises BrokenPipeError if the reader of a pipe closes it.

    `hvdkit.cli.main` then returns the exit status of SIGPIPE. The base class would exit with 1.
    """

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that the caller is handling."""
        raise
