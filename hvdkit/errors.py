"""The errors that hvdkit raises on purpose.

A message says what happened, what was expected and what to do. The command line prints the message
alone.
"""


class HvdkitError(RuntimeError):
    """An operation failed, or its environment is unsuitable. Command line: exit status 1."""

    # TensorFlow keeps the class of an error in a traced function only with this constructor.
    __init__ = Exception.__init__


class UsageError(HvdkitError, ValueError):
    """The user's arguments are invalid. Command line: exit status 2."""


#: Exit status of a job that has saved and stopped on request, and can be resumed (EX_TEMPFAIL of
#: sysexits.h).
RESUMABLE = 75

#: Exit status of the ranks of an elastic job whose hosts have changed: the launcher starts the
#: ranks again, on the new hosts. The value is ERESTART of Linux.
HOSTS_CHANGED = 85
