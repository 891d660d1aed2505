"""Strangers: connect to each new TCP port of this network namespace for SECONDS.

python port_scanner.py SECONDS

Of the connections to a port, most send nothing. One sends bytes that mean nothing, one sends a byte
now and then, and one is reset at once. A last line has the number of ports.
"""

import contextlib
import os
import select
import socket
import struct
import sys
import time

_SILENT = 5
_LISTENS = "0A"


def listening():
    """Yield the addresses and ports, in IPv4, at which processes listen."""
    with open("/proc/net/tcp", encoding="ascii") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                address, port = fields[1].split(":")
                yield socket.inet_ntoa(struct.pack("=I", int(address, 16))), int(port, 16)


def connect(address):
    line = socket.create_connection(address, 0.2)
    line.setblocking(False)
    return line


def main():
    seconds = float(sys.argv[1])
    seen, held, slow = set(), [], []
    end = time.monotonic() + seconds
    print("scans", flush=True)
    while time.monotonic() < end:
        for address in set(listening()) - seen:
            seen.add(address)
            with contextlib.suppress(OSError):
                held += [connect(address) for _ in range(_SILENT)]
                slow.append(connect(address))
                held.append(connect(address))
                held[-1].send(os.urandom(64))
                reset = connect(address)
                reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                reset.close()
        for line in slow:
            with contextlib.suppress(OSError):
                line.send(b"x")
        select.select([], [], [], 0.002)
    print(len(seen), flush=True)


if __name__ == "__main__":
    main()
