"""Parse, limit and measure the rate of the link between hosts."""

import json
import re
import subprocess
import time

from hvdkit.bench import namespaces
from hvdkit.errors import HvdkitError, UsageError

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_rate(text: str, option: str) -> float:
    """Return a rate in bytes per second.

    Args:
        text: such as `1Gbit/s`, `10gbit` or `25Gbps`.
        option: the name of the option, for the error.

    Raises:
        UsageError: the text has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:bit(?:/s)?|bps)", text.strip().lower())
    if found is None or not (bits := float(found[1]) * _PREFIXES[found[2]]):
        raise UsageError(f"{option} is {text!r}; expected bits per second, such as 1Gbit/s")
    return bits / 8


def limit(cluster: namespaces.Cluster, bytes_per_second: float) -> None:
    """Limit the links of all hosts of `cluster`."""
    for host in cluster.hosts:
        namespaces.limit_rate(host, f"{bytes_per_second * 8:.0f}bit")


def can_measure() -> bool:
    """Return whether iperf3 is installed, which `measure` needs."""
    return namespaces.missing_program(["iperf3"], "iperf3") is None


def measure(cluster: namespaces.Cluster) -> float:
    """Measure TCP between two hosts in both directions at once. Return the slower, in bytes/s."""
    server, client = cluster.hosts
    serve = subprocess.Popen(
        server.command(["iperf3", "--server", "--one-off"]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        command = ["iperf3", "--client", server.address, "--time", "3", "--bidir", "--json"]
        deadline = time.monotonic() + 10
        while True:
            in_host = client.command(command)
            try:
                done = subprocess.run(
                    in_host, capture_output=True, text=True, timeout=60, check=False
                )
                answer = json.loads(done.stdout or "{}")
            except (subprocess.TimeoutExpired, ValueError) as error:
                raise HvdkitError(f"iperf3 between the hosts: {error}") from error
            if done.returncode == 0 and "error" not in answer:
                break
            # The server may not be listening yet.
            if time.monotonic() > deadline:
                raise HvdkitError(f"iperf3 between the hosts: {answer.get('error') or done.stderr}")
            time.sleep(0.1)
    finally:
        serve.kill()
        serve.wait()
    both = (answer["end"]["sum_received"], answer["end"]["sum_received_bidir_reverse"])
    return min(float(way["bits_per_second"]) for way in both) / 8


def show_rate(bytes_per_second: float) -> str:
    """Return a rate for people."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
