"""The reduction of gradients: buckets, the synchronizer, wire formats, accumulation windows."""
