"""Commands on other hosts, over the system's ssh, with the user's ssh configuration.

Errors of ssh are explained with what to do.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.errors import HvdkitError
from hvdkit.launch.hosts import Host

#: ssh's exit status if the connection fails.
FAILED = 255

_CONNECT_SECONDS = 10
# The loss of a host is detected after three of these.
_SILENT_SECONDS = 10

_PYTHON_MISSING = (126, 127)
_DROPPED = (
    "kex_exchange_identification|Connection (closed|reset) by|Not allowed at this time"
    "|exceeded MaxStartups"
)


@dataclass(frozen=True)
class Ssh:
    """The settings of ssh.

    Attributes:
        port: the port of the ssh servers; None for that of ssh's configuration.
        identity: the file with the private key; None for that of ssh's configuration.
        arguments: the user's further arguments for ssh, which come first.
    """

    port: int | None = None
    identity: str | None = None
    arguments: Sequence[str] = ()

    def options(self) -> list[str]:
        """Return ssh's arguments before the host. Of contradicting ones, ssh uses the first."""
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity is None else ["-i", self.identity]
        settings = {
            "BatchMode": "yes",  # fail instead of asking
            "ConnectTimeout": _CONNECT_SECONDS,
            "ServerAliveInterval": _SILENT_SECONDS,
            "ServerAliveCountMax": 3,
            # Use an existing master, but start none: it would outlive the job.
            "ControlMaster": "no",
        }
        ours = [f"-o{name}={value}" for name, value in settings.items()]
        return [*self.arguments, *port, *identity, "-T", *ours]

    def command(self, host: Host, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on `host`, in `/`.

        Raises:
            HvdkitError: ssh is not installed.
        """
        if shutil.which("ssh") is None:
            raise HvdkitError(
                "there is no ssh here, and other hosts are reached over it; "
                "on Debian and Ubuntu: apt-get install openssh-client"
            )
        name = host.name.replace("[", "").replace("]", "")
        # `exec` leaves no shell between ssh and the command. `cd` keeps the home directory out of
        # Python's module path. Both work in sh, bash, zsh, csh and fish.
        return ["ssh", *self.options(), name, f"cd / && exec {shlex.join(command)}"]

    def failed_transiently(self, status: int | None, said: str) -> bool:
        """Return whether an ssh server refused the connection because it had too many.

        sshd drops new connections while more than 10 have not logged in yet (MaxStartups).

        Args:
            status: ssh's exit status; None while ssh runs.
            said: ssh's standard error.
        """
        return status == FAILED and re.search(_DROPPED, said) is not None

    def by_hand(self, program: str, host: Host) -> str:
        """Return the command line of `program` (ssh, ssh-copy-id) for `host`, for the user."""
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity is None else ["-i", self.identity]
        return shlex.join([program, *port, *identity, host.name])

    def explain(self, host: Host, status: int | None, said: str, python: str) -> str:
        """Return why the agent on `host` did not start, and what to do.

        Args:
            host: the host.
            status: ssh's exit status; None while ssh runs.
            said: the standard error of ssh and the agent.
            python: the Python of the agent.
        """
        port = self.port or 22
        known = f"[{host.address}]:{port}" if port != 22 else host.address
        scan = f"ssh-keyscan -p {port} {host.address} >> ~/.ssh/known_hosts"
        login = self.by_hand("ssh", host)
        answers = [
            (
                r"REMOTE HOST IDENTIFICATION HAS CHANGED",
                "its host key has changed. If the host was installed again: "
                f"`ssh-keygen -R '{known}'`, then log in once with `{login}`. Otherwise another "
                "machine may intercept the connection",
            ),
            (
                r"Host key verification failed|No \S+ host key is known",
                f"its host key is not known here. Log in once with `{login}` and compare its "
                f"fingerprint, or, on a network that you trust: `{scan}`",
            ),
            (
                r"Permission denied|Too many authentication failures",
                "it does not accept a login without a password. Give it your key with "
                f"`{self.by_hand('ssh-copy-id', host)}` (or name the key: --ssh-identity FILE), "
                f"until `ssh -oBatchMode=yes{login.removeprefix('ssh')} true` works",
            ),
            (
                r"Could not resolve hostname",
                "its name does not resolve; correct it, or add it to /etc/hosts or ~/.ssh/config",
            ),
            (
                r"Connection refused",
                f"no ssh server listens on port {port} there; start it (Debian: apt-get install "
                "openssh-server), or give the port with --ssh-port",
            ),
            (
                r"timed out|No route to host|Network is unreachable",
                f"it cannot be reached on port {port}; is it up, and does a firewall let ssh "
                f"through? Try `{login} true`",
            ),
            (
                _DROPPED,
                "an ssh server closed the connection at once, several times. Is it overloaded "
                "(MaxStartups in its sshd_config), or does it refuse this address?",
            ),
            (
                r"Identity file \S+ not accessible",
                "the file of --ssh-identity is not readable",
            ),
            (
                r"No module named '?(hvdkit|psutil)",
                f"{python} there has no hvdkit; install the same environment there, at the same "
                "path, or name its Python with --python",
            ),
        ]
        last = _last_line(said)
        for pattern, advice in answers:
            if re.search(pattern, said):
                return f"{advice} ({last})"
        if status in _PYTHON_MISSING:
            return (
                f"there is no Python at {python}; install the same environment there, at the same "
                f"path, or name its Python with --python ({last})"
            )
        if status is None:
            return f"no answer yet; try `{login} true` by hand ({last})"
        return f"ssh ended with status {status}; try `{login} true` by hand ({last})"


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
