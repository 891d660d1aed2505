"""The output of the command line."""

import rich.console


class Console(rich.console.Console):
    """A console whose closed pipe ends the program as it ends others, with SIGPIPE's status."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich is handling, instead of exiting with status 1."""
        raise
