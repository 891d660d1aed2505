"""Ceph's S3 server, RADOS Gateway, before a Ceph cluster of one monitor and one OSD in memory."""

import contextlib
import http.client
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import botocore.session

from tests.unit.checkpoint.s3_server import BUCKET, CREDENTIALS, free_port

_PROGRAMS = (
    *("ceph", "ceph-authtool", "ceph-mon", "ceph-osd"),
    *("monmaptool", "radosgw", "radosgw-admin"),
)
_INSTALL = "apt-get install --no-install-recommends ceph-mon ceph-osd radosgw"

#: Seconds for one command, and until the gateway answers: it creates its pools first.
_COMMAND_SECONDS = 60
_START_SECONDS = 180

# Each pool has one copy on the only OSD. A monitor stops on a disk that is 95% full: "crit" is 0.
_CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{port}
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {folder}/keyring
run dir = {folder}
admin socket =
log file = {folder}/$name.log
mon data = {folder}/mon
mon cluster log file = {folder}/cluster.log
mon data avail crit = 0
mon data avail warn = 0
mon allow pool size one = true
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
rgw rados pool pg num min = 1
rgw dynamic resharding = false
"""


def missing():
    """Return why the gateway cannot be started; None if it can."""
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)} not installed; as root: {_INSTALL}" if absent else None


@contextlib.contextmanager
def running():
    """Run the gateway, with the bucket and the user of `CREDENTIALS`. Yields its address.

    All files are in a temporary folder, and all ports are on 127.0.0.1.
    """
    with tempfile.TemporaryDirectory(prefix="hvdkit-rados-") as name, contextlib.ExitStack() as end:
        cluster = _Cluster(Path(name), end)
        cluster.start_monitor()
        cluster.start_osd()
        yield cluster.start_gateway()


class _Cluster:
    """A Ceph cluster in a folder."""

    def __init__(self, folder, end):
        """Args:
        folder: for all files.
        end: stops the daemons.
        """
        self._folder = folder
        self._end = end
        self._fsid = str(uuid.uuid4())
        self._port = free_port()
        # Without this Python's variables, because `ceph` is a script for Debian's Python.
        self._environment = {
            "PATH": os.environ["PATH"],
            "CEPH_CONF": str(folder / "ceph.conf"),
            "HVDKIT_TEST_SERVER": "rados",
        }
        (folder / "ceph.conf").write_text(
            _CONFIGURATION.format(fsid=self._fsid, port=self._port, folder=folder)
        )
        for data in ("mon", "osd"):
            (folder / data).mkdir()

    def start_monitor(self):
        keyring, monitors = self._folder / "keyring", self._folder / "monmap"
        self._run("ceph-authtool", "--create-keyring", keyring)
        everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
        for name, rights in {
            "mon.": ("--cap", "mon", "allow *"),
            "client.admin": everything,
            "osd.0": ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"),
        }.items():
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *rights)
        address = ("--addv", "a", f"[v2:127.0.0.1:{self._port}]")
        self._run("monmaptool", "--create", "--fsid", self._fsid, *address, monitors)
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monitors, "--keyring", keyring)
        self._start("ceph-mon", "-i", "a", "-f")

    def start_osd(self):
        own = str(uuid.uuid4())
        # Waits for the monitor.
        self._run("ceph", "osd", "new", own, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", own)
        self._start("ceph-osd", "-i", "0", "-f")

    def start_gateway(self):
        """Return the address."""
        port = free_port()
        frontend = ("--rgw-frontends", f"beast endpoint=127.0.0.1:{port}")
        gateway = self._start("radosgw", "-n", "client.admin", "-f", *frontend)
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(port):
            assert time.monotonic() < deadline, self._logs()
            assert gateway.poll() is None, self._logs()
            time.sleep(0.1)
        key, secret = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
        user = ("--uid", "tests", "--display-name", "tests", "--access-key", key)
        self._run("radosgw-admin", "user", "create", *user, "--secret-key", secret)
        address = f"http://127.0.0.1:{port}"
        client = botocore.session.Session().create_client(
            "s3",
            endpoint_url=address,
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
            aws_access_key_id=key,
            aws_secret_access_key=secret,
        )
        with contextlib.closing(client):
            client.create_bucket(Bucket=BUCKET)
        return address

    def _run(self, *command):
        ended = subprocess.run(
            [str(word) for word in command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
        )
        assert ended.returncode == 0, f"{command}: {ended.stderr}\n{self._logs()}"

    def _start(self, *command):
        """Start a daemon, which ends with the cluster."""
        with (self._folder / f"{command[0]}.out").open("wb") as out:
            process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._end.callback(process.wait, timeout=30)
        self._end.callback(process.kill)
        return process

    def _logs(self):
        """The last lines of all daemons."""
        found = sorted([*self._folder.glob("*.out"), *self._folder.glob("*.log")])
        return "\n".join(
            "\n".join([f"== {path.name}", *path.read_text(errors="replace").splitlines()[-20:]])
            for path in found
        )


def _answers(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
