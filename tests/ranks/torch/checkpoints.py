"""One save, or one restore, with a checkpointer of its own."""


def save_once(hvd, folder, **items):
    """Save step 1."""
    with hvd.Checkpointer(folder, **items) as checkpointer:
        checkpointer.save(1)


def restore_once(hvd, folder, strict=True, **items):
    """Restore the newest step."""
    with hvd.Checkpointer(folder, **items) as checkpointer:
        return checkpointer.restore(strict=strict)
