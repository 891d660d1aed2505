"""Commands on other hosts, over the system's ssh: the user's configuration, jump hosts and agents
work as they do by hand. What ssh complains of is answered with what to do.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.errors import HvdkitError
from hvdkit.launch.hosts import Host

#: ssh's own exit status, where the connection fails and not the command.
FAILED = 255

_CONNECT_SECONDS = 10
# A host that has gone without a word is noticed after three of these.
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
        port: the port of their ssh server; None for what ssh's configuration says.
        identity: the file with the private key; None likewise.
        arguments: further arguments for ssh, before all of ours.
    """

    port: int | None = None
    identity: str | None = None
    arguments: Sequence[str] = ()

    def options(self) -> list[str]:
        """ssh's arguments before the host. ssh takes the first of two that contradict."""
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity is None else ["-i", self.identity]
        settings = {
            "BatchMode": "yes",  # fail rather than ask: nobody is there to answer
            "ConnectTimeout": _CONNECT_SECONDS,
            "ServerAliveInterval": _SILENT_SECONDS,
            "ServerAliveCountMax": 3,
            # One that is there is used; one made here would outlive the job, with its pipes.
            "ControlMaster": "no",
        }
        ours = [f"-o{name}={value}" for name, value in settings.items()]
        return [*self.arguments, *port, *identity, "-T", *ours]

    def command(self, host: Host, command: Sequence[str]) -> list[str]:
        """`command` on `host`, as it has to be started here; it begins in `/`.

        Raises:
            HvdkitError: there is no ssh.
        """
        if shutil.which("ssh") is None:
            raise HvdkitError(
                "there is no ssh here, and other hosts are reached over it; "
                "on Debian and Ubuntu: apt-get install openssh-client"
            )
        name = host.name.replace("[", "").replace("]", "")
        # `exec`, so that no shell stands between; `cd`, so that nothing that lies in the home
        # directory is imported. Both work alike in sh, bash, zsh, csh and fish.
        return ["ssh", *self.options(), name, f"cd / && exec {shlex.join(command)}"]

    def refused_for_now(self, status: int | None, said: str) -> bool:
        """Return whether a server, or one on the way, had too many connections in that moment.

        sshd drops new ones while more than 10 have not logged in yet (MaxStartups).

        Args:
            status: ssh's exit status; None while it is still running.
            said: what ssh wrote to standard error.
        """
        return status == FAILED and re.search(_DROPPED, said) is not None

    def by_hand(self, program: str, host: Host) -> str:
        """`program` (ssh, ssh-copy-id) for `host` as a user would type it."""
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity is None else ["-i", self.identity]
        return shlex.join([program, *port, *identity, host.name])

    def explain(self, host: Host, status: int | None, said: str, python: str) -> str:
        """Why a command on `host` did not come up, and what to do.

        Args:
            host: where it was to run.
            status: ssh's exit status; None while it is still running.
            said: what ssh and the command wrote to standard error.
            python: the Python that was to be started there.
        """
        port = self.port or 22
        known = f"[{host.address}]:{port}" if port != 22 else host.address
        scan = f"ssh-keyscan -p {port} {host.address} >> ~/.ssh/known_hosts"
        login = self.by_hand("ssh", host)
        answers = [
            (
                r"REMOTE HOST IDENTIFICATION HAS CHANGED",
                "its host key is another one than before. If the host was installed anew: "
                f"`ssh-keygen -R '{known}'`, then log in once with `{login}`. Else somebody is in "
                "between",
            ),
            (
                r"Host key verification failed|No \S+ host key is known",
                f"its host key is not known here. Log in once with `{login}` and compare its "
                f"fingerprint, or, on a network that you trust: `{scan}`",
            ),
            (
                r"Permission denied|Too many authentication failures",
                "it does not let you in without a password. Give it your key with "
                f"`{self.by_hand('ssh-copy-id', host)}` (or name the key: --ssh-identity FILE), "
                f"until `ssh -oBatchMode=yes{login.removeprefix('ssh')} true` works",
            ),
            (
                r"Could not resolve hostname",
                "its name is not known here; correct it, or add it to /etc/hosts or ~/.ssh/config",
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
