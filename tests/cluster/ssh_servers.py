"""An ssh server on each host, with keys made for the test: nothing of this machine's own ssh."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import Cluster, Host, lacking

_SECONDS = 30
_SSHD = "/usr/sbin/sshd"

# Start-up files of a user's shell like to print something, also where nobody has logged in.
_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
ListenAddress {address}
{second}
PidFile none
{settings}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
ForceCommand echo "Welcome to $(hostname)"; eval "$SSH_ORIGINAL_COMMAND"
"""

_CLIENT = """\
Host *
    IdentityFile {folder}/client_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    ControlMaster no
"""


def missing() -> str | None:
    """Why there can be no ssh servers here; None where there can."""
    return lacking((_SSHD, "ssh", "ssh-keygen"), "openssh-server openssh-client")


@dataclass(frozen=True)
class Access:
    """How a user reaches the hosts.

    Attributes:
        config: the file of ssh's settings.
        known_hosts: the file with the hosts' keys.
        authorized_keys: by host, the file with the keys that it lets in.
    """

    config: Path
    known_hosts: Path
    authorized_keys: dict[str, Path]


@contextlib.contextmanager
def ssh_servers(
    cluster: Cluster,
    folder: Path,
    before: dict[str, Sequence[str]] | None = None,
    settings: dict[str, str] | None = None,
) -> Iterator[Access]:
    """Start an ssh server on each host, which the others reach by name without being asked.

    Args:
        cluster: the hosts.
        folder: where keys and settings go.
        before: by host, shell commands to run there first; mounts that they make are seen by
            what runs there over ssh, and nowhere else.
        settings: by host, lines for its server's configuration.
    """
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "client_key"))
    Path("/run/sshd").mkdir(exist_ok=True)
    known, authorized = [], {}
    servers = []
    try:
        for host in cluster.hosts:
            own = folder / host.name
            own.mkdir()
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own / "host_key"))
            authorized[host.name] = own / "authorized_keys"
            shutil.copy(folder / "client_key.pub", authorized[host.name])
            key = (own / "host_key.pub").read_text().rsplit(" ", 1)[0]
            known.append(f"{host.name},{host.address},{host.address6} {key}\n")
            second = f"ListenAddress {host.address6}" if host.has_address6() else ""
            (own / "sshd_config").write_text(
                _SERVER.format(
                    folder=own,
                    address=host.address,
                    second=second,
                    settings=(settings or {}).get(host.name, ""),
                )
            )
            commands = (before or {}).get(host.name, ())
            script = "; ".join(["set -e", *commands, f'exec {_SSHD} -D -e -f "$0"'])
            servers.append(
                subprocess.Popen(
                    host.command(["sh", "-c", script, str(own / "sshd_config")]),
                    stdin=subprocess.DEVNULL,
                    stderr=(own / "log").open("wb"),
                    start_new_session=True,
                )
            )
        known_hosts = folder / "known_hosts"
        known_hosts.write_text("".join(known))
        config = folder / "ssh_config"
        config.write_text(_CLIENT.format(folder=folder))
        for host in cluster.hosts:
            _wait_for_port(host, cluster.hosts[0])
        yield Access(config, known_hosts, authorized)
    finally:
        for server in servers:
            server.kill()
            server.wait(timeout=_SECONDS)


def _wait_for_port(host: Host, asker: Host) -> None:
    probe = f"exec 3<>/dev/tcp/{host.address}/22"
    deadline = time.monotonic() + _SECONDS
    while subprocess.run(
        asker.command(["bash", "-c", probe]), capture_output=True, timeout=_SECONDS, check=False
    ).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no ssh server on {host.name}")
        time.sleep(0.05)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
