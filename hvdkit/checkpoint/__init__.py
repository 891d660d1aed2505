"""Crash-safe checkpoints of a job: a store of steps, and a manager that all ranks call together.

A save goes through these modules:

    manager       all ranks enter `save` and succeed or fail together (`calls`, `coordination`)
    state, items  each stateful item returns its state as a tree of tensors
    saving        all ranks check that they save the same state
    snapshot      rank 0 copies the tensors to host memory; training continues
    background    a thread writes the copy
    writing       encodes the parts as tensor files (`tensors`, `chunks`) and JSON (`tree`)
    store         commits the step, and deletes old steps (`retention`)
    storage       the protocol behind the store: `posix` folders or `objects` in a bucket

A restore goes back: `store` finds the newest step, `reading` verifies it while rank 0 reads it,
`broadcast` sends the tensors to all ranks, and `restoring` hands the state to the items. The
package is framework-free.
"""
