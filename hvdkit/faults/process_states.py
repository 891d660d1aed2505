"""The states of a rank's process that a verdict knows, as texts for the user."""

STOPPED = "stopped"
ENDED = "ended"
