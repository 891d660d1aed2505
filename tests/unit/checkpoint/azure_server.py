"""Azurite: the server that Azure's developers test with."""

import asyncio
import contextlib
import http.client
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.unit.checkpoint.s3_server import free_port

CONTAINER = "checkpoints"
_ROOT = Path(__file__).resolve().parents[3]
# The fixed key of every Azurite: https://github.com/Azure/Azurite#default-storage-account
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def program():
    """Return Azurite's program, from `scripts/test --long` or PATH; None without it."""
    own = _ROOT / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
    return str(own) if own.exists() else shutil.which("azurite-blob")


@contextlib.contextmanager
def running(log):
    """Run Azurite with the container. Yields the environment for its clients."""
    port = free_port()
    command = [program(), "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--skipApiVersionCheck", "--disableTelemetry"],
            env=os.environ | {"HVDKIT_TEST_SERVER": "azure"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    account = "AccountName=devstoreaccount1;AccountKey=" + _KEY
    address = f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1"
    connection = f"DefaultEndpointsProtocol=http;{account};{address};"
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            assert time.monotonic() < deadline, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        asyncio.run(_make_container(connection))
        yield {"AZURE_STORAGE_CONNECTION_STRING": connection}
    finally:
        process.kill()
        process.wait(timeout=30)


def _answers(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/")
        connection.getresponse()
    except OSError:
        return False
    finally:
        connection.close()
    return True


async def _make_container(connection):
    from azure.storage.blob.aio import BlobServiceClient

    async with BlobServiceClient.from_connection_string(connection) as client:
        await client.create_container(CONTAINER)
