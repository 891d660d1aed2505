"""The end of a job: events, the facts that follow from them, the outcome, and reports."""
