"""What is reduced and how: bucketing, the synchronizer, wire formats, accumulation windows."""
