"""The names of options on the command line."""


def flag(option: str) -> str:
    """Return an option as the user types it, given its name in a namespace of argparse."""
    return f"--{option.replace('_', '-')}"
