"""Tell the launcher that the script makes an orderly end, although its process may still run.

At the end of a script, Python waits for threads that are not daemons and for the processes of
`multiprocessing`. The launcher would wait for a rank that has nothing left to save.
"""

from __future__ import annotations

import sys


def note_end_with(status: int) -> None:
    """Report an exit status when the script ends. Call this before raising `SystemExit(status)`.

    If the script catches `SystemExit`, the launcher uses the exit status of the process. It uses
    the reported status only if the process does not end by itself.

    Args:
        status: the exit status.
    """
    # The launcher has loaded this module in the first Python of a rank.
    hook = sys.modules.get("_hvdkit_self_report")
    if hook is not None:
        hook.note_end_with(status)
