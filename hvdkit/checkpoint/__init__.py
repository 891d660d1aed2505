"""Crash-safe checkpoints of a job: a store of steps, and a manager that all ranks call together.

A step is one checkpoint. Its number is the number of optimizer steps trained before it. A part is
the saved state of one stateful item, such as the model. A run is the sequence of steps of one
training; a resumed training continues its run.

A save goes through these modules:

    manager       all ranks enter `save` and succeed or fail together (`calls`, `coordination`)
    state, items  each stateful item returns its state as a tree of tensors
    saving        all ranks check that they save the same state
    snapshot      rank 0 copies the tensors to host memory; training continues
    background    a thread writes the copy
    writing       writes a tensor file for each part (`tensors`, `chunks`) and JSON (`tree`),
                  commits the step, and deletes old steps (`retention`)
    storage       the protocol for storing files: `posix` folders or `objects` in a bucket

`restoring` restores a step: `store` finds the newest one, `reading` reads and verifies it on rank
0, and `broadcast` sends the tensors to all ranks. Then each item loads its state. `command` and
`report` are `hvdkit checkpoint`; `weights` and `h5` export models. No module here needs a
framework.
"""
