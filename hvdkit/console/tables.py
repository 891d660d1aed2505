"""The console on which commands of `hvdkit` print tables and colours."""

from typing import Any

import rich.console
import rich.text

from hvdkit.system.plain_files import printable


class Console(rich.console.Console):
    """A console for texts of others: it prints no control characters, markup or emoji of them.

    It raises BrokenPipeError if the reader of a pipe closes it. `hvdkit.cli.main` then returns the
    exit status of SIGPIPE. The base class would exit with 1.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, **how)

    def render_str(self, text: str, **how: Any) -> rich.text.Text:
        """Convert a text that is printed, or is a cell of a table."""
        return super().render_str(printable(text), **how)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that the caller is handling."""
        raise
