"""The states of a rank's process that a verdict knows, as texts for the user."""

STOPPED = "stopped"
ENDED = "ended"
#: The rank is in `hvd.shutdown()`, or its script has ended, and its process still runs.
LEAVING = "leaving"
#: The rank has continued since its last record. What it does now is not known.
CONTINUED = "continued"
#: The rank is on another host, whose records are not known here. It may do anything.
ELSEWHERE = "elsewhere"
