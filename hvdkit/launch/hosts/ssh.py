"""Run commands on other hosts with the system's ssh and the user's ssh configuration.

If ssh fails, its error is explained, with what the user can do.
"""

from __future__ import annotations

import getopt
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.errors import HvdkitError
from hvdkit.launch.hosts.hosts import Host
from hvdkit.system.processes import exit_text

#: Seconds without an answer after which a host is lost, by default.
HOST_SECONDS = 30.0
#: ssh's exit status if the connection fails.
FAILED = 255

_CONNECT_SECONDS = 10
# A silent host is lost after this number of intervals between keepalive messages.
_KEEPALIVES = 3

# ssh's options, as for `getopt`.
_OPTIONS = "46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w:"
# A shell that cannot execute Python says "Permission denied" without the bracket.
_REFUSED = r"Permission denied \(|Too many authentication failures"
_PYTHON_MISSING = (126, 127)
_DROPPED = (
    "kex_exchange_identification|Connection (closed|reset) by|Not allowed at this time"
    "|exceeded MaxStartups"
)
_NO_ANSWER = "not responding|timed out"
_LOST = f"{_NO_ANSWER}|closed by remote host|Connection reset|Broken pipe"
# Other messages of ssh at the end of a connection that was made.
_FAILED_LATER = "ssh_dispatch_run_fatal|client_loop|packet_write|Bad packet|Corrupted MAC"
# A server in ssh's messages. Before ssh has checked the host key, any machine on the network can
# write into these messages, so other texts, such as `$(command)`, are not shown in advice.
_SERVER = r"([A-Za-z0-9_:][A-Za-z0-9_.:%-]*)"
#: A line in which ssh says that it has lost a host.
LOST_LINE = re.compile(
    r"(Timeout, server|Connection to) \S+ (not responding|closed by remote host)"
)
#: What the user can do if a host does not answer any more.
NO_ANSWER = "the host does not answer; check its network, and whether it was shut down"


@dataclass(frozen=True)
class Ssh:
    """The settings of ssh.

    Attributes:
        port: the port of the ssh servers; None for the port in ssh's configuration.
        identity: the file with the private key; None for the file in ssh's configuration.
        arguments: further arguments of the user for ssh. They come first.
        silence: the seconds without an answer after which a host is lost (`--host-timeout`).
    """

    port: int | None = None
    identity: str | None = None
    arguments: Sequence[str] = ()
    silence: float = HOST_SECONDS

    def options(self) -> list[str]:
        """Return ssh's arguments before the host. If two contradict, ssh uses the first."""
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity is None else ["-i", self.identity]
        interval = max(1, int(self.silence / _KEEPALIVES))
        settings = {
            "BatchMode": "yes",  # fail instead of asking
            "ConnectTimeout": _CONNECT_SECONDS,
            "ServerAliveInterval": interval,
            # ssh ends one interval after the last message without an answer.
            "ServerAliveCountMax": max(1, round(self.silence / interval) - 1),
            # Use an existing master connection, but start none: it would outlive the job.
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
                "ssh is not installed here, but other hosts are reached over ssh; install it, "
                "on Debian and Ubuntu with: apt-get install openssh-client"
            )
        # With `exec`, no shell remains between ssh and the command. With `cd`, the home directory
        # is not in Python's module path. Both work in sh, bash, zsh, csh and fish.
        return ["ssh", *self.options(), _login_name(host), f"cd / && exec {shlex.join(command)}"]

    def failed_transiently(self, status: int | None, stderr: str) -> bool:
        """Return whether an ssh server refused the connection because it had too many connections.

        sshd drops new connections while more than 10 connections wait for a login (MaxStartups).

        Args:
            status: ssh's exit status; None while ssh runs.
            stderr: ssh's standard error.
        """
        return status == FAILED and re.search(_DROPPED, stderr) is not None

    def lost_connection(self, status: int | None, stderr: str) -> bool:
        """Return whether ssh has lost a host to which it was connected.

        If only the agent is killed, ssh may end with the same status, but writes no message.

        Args:
            status: ssh's exit status; None while ssh runs.
            stderr: ssh's standard error.
        """
        return status == FAILED and re.search(_LOST, stderr) is not None

    def by_hand(self, program: str, host: Host) -> str:
        """Return the command line of `program` (ssh, ssh-copy-id) for `host`, for the user."""
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity is None else ["-i", self.identity]
        arguments = self.arguments if program == "ssh" else _for_copy_id(self.arguments)
        return shlex.join([program, *arguments, *port, *identity, _login_name(host)])

    def explain_end(self, status: int, stderr: str) -> str:
        """Return why ssh has ended after the agent had started.

        Args:
            status: ssh's exit status, which is not the agent's: `FAILED`, or negative.
            stderr: the standard error of ssh and the agent.
        """
        last = _last_line(stderr)
        if status < 0:
            return _killed_here(status)
        if re.search(_NO_ANSWER, stderr):
            return f"{NO_ANSWER} ({last})"
        if re.search(f"{_LOST}|{_FAILED_LATER}", stderr):
            return (
                f"the ssh connection has ended; check the network of the host, and whether the "
                f"host was shut down, or its ssh server was killed ({last})"
            )
        return (
            f"its agent was killed there, for example because the memory of the host or of a "
            f"cgroup was full; see `dmesg` there ({last})"
        )

    def explain(
        self, host: Host, status: int | None, stderr: str, python: str, said: str = ""
    ) -> str:
        """Return why the agent on `host` did not start, and what to do.

        Args:
            status: ssh's exit status; None while ssh runs.
            stderr: the standard error of ssh and the agent.
            python: the Python of the agent.
            said: the last line on standard output, of the login shell.
        """
        name, port = self._server(host, stderr)
        known = f"[{name}]:{port}" if port != 22 else name
        scan = f"ssh-keyscan -p {port} {name} >> ~/.ssh/known_hosts"
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
                # Only if the login failed: otherwise another key was accepted.
                rf"Identity file .+ not accessible(.|\n)*({_REFUSED})",
                "the file of --ssh-identity cannot be read; check its path and its permissions",
            ),
            (
                _REFUSED,
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
                f"it cannot be reached on port {port}; check that the host runs and that no "
                f"firewall blocks ssh. Try `{login} true`",
            ),
            (
                _DROPPED,
                "an ssh server closed the connection at once, several times. Check whether it is "
                "overloaded (MaxStartups in its sshd_config), or refuses this address",
            ),
            (
                r"No module named '?\w",
                f"{python} there has no hvdkit, or not all that hvdkit needs; install the same "
                "environment there, at the same path, or give the path of its Python with --python",
            ),
        ]
        last = _last_line(stderr if stderr.strip() else said)
        for pattern, advice in answers:
            if re.search(pattern, stderr):
                return f"{advice} ({last})"
        if status in _PYTHON_MISSING:
            return (
                f"there is no executable Python at {python}; install the same environment "
                f"there, at the same path, or give the path of its Python with --python ({last})"
            )
        if status is None:
            return f"ssh has not ended; try `{login} true` by hand ({last})"
        if status < 0:
            return _killed_here(status)
        return f"ssh ended with status {status}; try `{login} true` by hand ({last})"

    def _server(self, host: Host, stderr: str) -> tuple[str, int]:
        """Return the name and port of the ssh server of `host`.

        ssh's configuration may set another name and port. ssh's messages show them.
        """
        for message in (
            rf"connect to (?:host|address) {_SERVER} port ([0-9]{{1,5}})\b",
            rf"host key is known for \[{_SERVER}\]:([0-9]{{1,5}})\b",
            rf"-R [\"']?\[{_SERVER}\]:([0-9]{{1,5}})\b",
        ):
            if found := re.search(message, stderr):
                return found[1], int(found[2])
        return host.address, self.port or 22


def _login_name(host: Host) -> str:
    """Return the name of a host for ssh, which takes IPv6 addresses without brackets."""
    return host.name.replace("[", "").replace("]", "")


def _for_copy_id(arguments: Sequence[str]) -> list[str]:
    """Return the user's arguments for ssh that concern the connection, for ssh-copy-id.

    ssh-copy-id has -F, -o and -p of ssh's options, but not -J.
    """
    try:
        options, _ = getopt.getopt(list(arguments), _OPTIONS)
    except getopt.GetoptError:
        return []
    settings = [
        ("-o", f"ProxyJump={value}") if name == "-J" else (name, value) for name, value in options
    ]
    return [f"{name}{value}" for name, value in settings if name in ("-F", "-o", "-p")]


def _killed_here(status: int) -> str:
    return f"its ssh on this machine was {exit_text(status)}; check what killed it"


def _last_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
