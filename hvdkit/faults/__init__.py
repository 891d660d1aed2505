"""Find out why a job hangs or failed, from the records of its ranks.

records   the files that the engine's flight recorder writes, one per rank
stacks    Python's stacks in a record
verdict   which ranks wait for which collective, and what the missing ranks do
mismatch  which ranks have called a collective with another tensor than the others
waits     which collectives lack ranks, and which records are of an earlier stall
command   `hvdkit why`
"""
