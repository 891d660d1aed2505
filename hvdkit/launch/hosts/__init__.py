"""The hosts of a job: lists, batch systems, ssh."""
