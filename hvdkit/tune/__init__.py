"""`hvdkit tune`: run a training for some steps, with other settings in each run, and compare.

command      the arguments, and the choice between the two tasks
trials       one run of the user's command, and its end: passed, out of memory, or an error
limited      starts a rank with a limit of memory
batch_sizes  the largest batch size that fits in memory, and what it means for the learning rate
buckets      bucket size, wire format, and how ranks of a host are combined
"""
