"""The names of the files in the folder of HVDKIT_RECORD_DIR.

The ranks (`hvdkit.runtime`) and the launcher (`hvdkit.faults`, `hvdkit.launch`) use the same
folder. The engine knows two of the names, too (`engine/sources/recorder.h`).
"""

#: The record of a rank. The engine writes it.
RECORD = "rank-{}.json"
#: The stacks of a rank's threads. Each rank makes the file in `hvd.init()`, also if its script uses
#: the signal for stacks. So these files show which ranks write to the folder.
STACKS = "rank-{}.stacks"
#: All ranks write a record when this file is touched. The engine looks at it.
REQUEST = "request"
#: A rank touches this file when it has saved a new checkpoint or a new commit.
SAVED = "saved"
#: A rank touches this file when its host has the newest commit of an elastic job.
COMMITTED = "committed"
#: The rank has called `hvd.init()` for the start with this number, and may wait for other ranks.
#: Only of ranks over MPI, each of which has a folder of its own. This file and the next two are
#: empty, so they fit on a full disk.
ENTERED = "init-{}-entered"
#: The engines of all ranks are connected.
CONNECTED = "init-{}-connected"
#: The rank is in `hvd.shutdown()`, or its script has ended. Over MPI, it may wait forever.
LEAVING = "init-{}-leaving"
#: The job of the folder, if each rank of a host has a folder of its own. This file is empty, too.
JOB = "job-{}"
#: The note of a rank that has called `hvd.shutdown()`.
NOTE = "shutdown-{}.json"

#: In the output folder of a start: the folder for records, and in it the states of the ranks'
#: processes, sentences about hosts that did not answer the launcher, and the exceptions of running
#: ranks.
FOLDER, STATES, SILENT, RAISED = "records", "states.json", "silent.json", "raised.json"
