"""An ssh server on each host, with keys for the test. This machine's own ssh is not used."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.bench.namespaces import Cluster, Host, missing_program

_SECONDS = 30
_SSHD = "/usr/sbin/sshd"

# ForceCommand prints a line, as a user's shell start-up files may do.
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
    """Return why ssh servers cannot run here; None if they can."""
    return missing_program((_SSHD, "ssh", "ssh-keygen"), "openssh-server openssh-client")


@dataclass(frozen=True)
class Access:
    """The files for ssh to the hosts.

    Attributes:
        config: the file of ssh's settings.
        known_hosts: the file with the hosts' keys.
        authorized_keys: by host, the file with the keys that it accepts.
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
    """Run an ssh server on each host, with access by name and without questions.

    Args:
        cluster: the hosts.
        folder: the folder for keys and settings.
        before: by host, shell commands to run there first. Only processes over ssh see mounts that
            these commands make.
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
            own_settings = (settings or {}).get(host.name, "")
            text = _SERVER.format(
                folder=own, address=host.address, second=second, settings=own_settings
            )
            (own / "sshd_config").write_text(text)
            commands = (before or {}).get(host.name, ())
            script = "; ".join(["set -e", *commands, f'exec {_SSHD} -D -e -f "$0"'])
            servers.append(
                subprocess.Popen(
                    host.command(["sh", "-c", script, str(own / "sshd_config")]),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
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
