"""The command that starts an agent, here or over ssh."""

from __future__ import annotations

import os
import sys

from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh

_AGENT = ["-P", "-m", "hvdkit.launch.agent.main"]
# The search paths of Python modules and of libraries.
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")


def agent_command(host: Host, local: bool, ssh: Ssh, python: str) -> list[str]:
    """Return the command that starts the agent on `host`.

    Args:
        local: whether the host is this machine. The agent then runs with this process's Python.
        ssh: how to reach other hosts.
        python: the Python of an agent on another host. It gets this process's PYTHONPATH and
            LD_LIBRARY_PATH.
    """
    if local:
        return local_agent_command()
    paths = [f"{name}={os.environ[name]}" for name in agent_variables()]
    return ssh.command(host, [*(["env", *paths] if paths else []), python, *_AGENT])


def agent_variables() -> list[str]:
    """Return the names of this process's variables that an agent on another host needs.

    Environment modules set them.
    """
    return [name for name in _PATHS if os.environ.get(name)]


def local_agent_command() -> list[str]:
    """Return the command that starts an agent with this process's Python."""
    return [sys.executable, *_AGENT]
