"""Profile some steps of a training on all ranks, and write one trace for Perfetto.

profile     `BaseProfile`: when to record, and what the ranks exchange
clocks      the offset between the clock of a rank and that of the first rank
events      the collectives of the engine's flight recorder as events of a trace
timeline    Horovod's timeline as events of a trace
trace_file  the file
"""
