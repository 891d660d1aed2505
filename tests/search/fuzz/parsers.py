"""The parsers that are fuzzed: their seeds, how they are called, and their documented errors."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import logging
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.system.plain_files import parse_json, printable

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Parser:
    """A parser.

    Attributes:
        seeds: returns valid inputs, and those that once broke something.
        opened: a context manager with a folder: yields the function that parses an input.
        errors: the documented errors.
    """

    seeds: Callable[[], Sequence[bytes]]
    opened: Callable[[Path], contextlib.AbstractContextManager[Parse]]
    errors: tuple[type[Exception], ...] = (HvdkitError,)


def simple(parse: Callable[[Path, bytes], object]) -> Callable[[Path], Any]:
    """Return `opened` for a function of the folder and the input."""

    @contextlib.contextmanager
    def opened(folder: Path) -> Iterator[Parse]:
        yield lambda data: parse(folder, data)

    return opened


def shown(text: str) -> None:
    """Check that a text can be shown on a terminal."""
    assert text == printable(text), "control characters"


def large(unit: bytes, size: int) -> bytes:
    """Return a JSON array of many small values."""
    return b"[" + b",".join([unit] * (size // (len(unit) + 1))) + b"]"


#: Inputs that have broken readers of JSON.
HOSTILE_JSON = (
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 900 + b"]" * 900,
    b"1" * 100_000,
    b"NaN",
    large(b"[]", 3_000_000),
    large(b"{}", 3_000_000),
    large(b'"ab"', 3_000_000),
    b'"' + b"\\u202e" * 100_000 + b'"',
)


# Hosts of launchers and batch systems.

HOSTS = (
    *(b"host0:4,host1:4", b"me@host0:2", b"[fe80::1%eth0]:2", b"host0\nhost1:3\n", b"localhost"),
    *(b"host0 slots=2 max-slots=4\nhost1 slots = 3 # comment\n", b"a\na\na\nb\n", b"\xef\xbb\xbfa"),
    b"\n".join(b"host%d:1" % n for n in range(100_000)),
    b",".join(b"host%d:1" % n for n in range(100_000)),
    b"h:" + b"9" * 5000,
)


def parse_hosts(folder: Path, data: bytes) -> None:
    from hvdkit.launch.hosts import hosts

    text = data.decode(errors="replace")
    path = folder / "hostfile"
    path.write_bytes(data)
    for parse in (
        lambda: hosts.parse_hosts(text),
        lambda: hosts.parse_lines(text, "a script"),
        lambda: hosts.read_hostfile(path),
    ):
        with contextlib.suppress(UsageError):
            assert all(host.slots > 0 for host in parse())


def parse_discovery(folder: Path, data: bytes) -> None:
    from hvdkit.launch.hosts.discovery import discover

    (folder / "output").write_bytes(data)
    script = folder / "discover"
    if not script.exists():
        script.write_text(f"#!/bin/sh\nexec cat '{folder}/output'\n")
        script.chmod(0o700)
    discover(script)


BATCH = tuple(
    json.dumps(each).encode()
    for each in (
        {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "a[1-3],b07,rack[1-2]n[01-04,7]",
            "SLURM_TASKS_PER_NODE": "2(x11),1",
            "SLURM_JOB_CPUS_PER_NODE": "8(x3),4",
            "SLURM_CPUS_PER_TASK": "2",
        },
        {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "3",
            "SLURM_JOB_NODELIST": "a[1-3]",
            "SLURM_STEP_NODELIST": "a3,b07",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_JOB_CPUS_PER_NODE": "8(x3),4",
        },
        *({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": counts}
          for nodes, counts in (
              ("a[0-999999999]", "1"),
              ("a[1-99][1-99][1-99][1-99][1-99]", "1"),
              ("a[" + "1-90000," * 100 + "1]", "1"),
              ("a," * 60_000, "1"),
              ("[" * 60_000, "1"),
              ("a[" + "9" * 5000 + "]", "1"),
              ("a", "1(x999999999999)"),
              ("a", "9" * 5000),
          )),
        {"LSB_MCPU_HOSTS": "host1 4 host2 4 host1 1"},
        {"LSB_MCPU_HOSTS": "host1 " + "9" * 5000},
        {"PBS_NODEFILE": "FILE", "content": "host1\nhost1\nhost2\n"},
        {"PE_HOSTFILE": "FILE", "content": "host1 4 all.q UNDEFINED\nhost2 2 all.q <NULL>\n"},
    )
)  # fmt: skip


def parse_batch(folder: Path, data: bytes) -> None:
    from hvdkit.launch.hosts import allocation

    if len(data) > 300_000:
        return  # more than an environment
    try:
        env = dict(parse_json(data))
    except (ValueError, TypeError, RecursionError):
        return  # not an environment
    content = str(env.pop("content", ""))
    (folder / "nodes").write_text(content, errors="replace")
    # The environment has no null characters, and at most 128 kB.
    env = {str(k): str(v).replace("\0", "")[:128_000] for k, v in env.items()}
    for name in ("PBS_NODEFILE", "PE_HOSTFILE"):
        if name in env:
            env[name] = str(folder / "nodes")
    for read in (allocation.read, allocation.batch_hosts):
        with contextlib.suppress(UsageError):
            read(env)


# Messages and files of a job.

MESSAGES = (
    b'{"kind":"hello","hostname":"a","problems":[]}',
    b'{"kind":"output","rank":0,"stream":"stdout","text":"\\udcff"}',
    b'{"kind":"record","text":"{}"}',
    *HOSTILE_JSON,
)


def parse_message(folder: Path, data: bytes) -> None:
    from hvdkit.launch.control import messages

    messages.decode(data)


RENDEZVOUS_FILE = (
    b'{"addresses": ["10.0.0.1", "fe80::1"], "port": 29400, "key": "0123456789abcdef"}',
    b'{"addresses": [], "port": 1e300, "key": []}',
    *HOSTILE_JSON,
)


def parse_rendezvous_file(folder: Path, data: bytes) -> None:
    from hvdkit.launch.launchers.nodes import joining

    path = folder / "job"
    path.touch(mode=0o600)
    path.write_bytes(data)
    joining.read_file(path)


def lease_seeds() -> Sequence[bytes]:
    from hvdkit.checkpoint.lease import Lease

    return (Lease.own().to_bytes(3), b"", b"{}", *HOSTILE_JSON)


def parse_lease(folder: Path, data: bytes) -> None:
    from hvdkit.checkpoint.lease import Lease

    if (found := Lease.parse(data)) is not None:
        shown(str(found))


# Records of a job, for `hvdkit why` and `hvdkit report`.

CALL = {
    "name": "allreduce.loss", "call": 3, "operation": 0, "set": 0, "dtype": 7, "bytes": 4,
    "enqueued": 99.0, "ended": None, "line": "train.py:21",
}  # fmt: skip
RECORD = {
    "version": 1, "limit": 60, "rank": 0, "size": 2, "host": "host0", "pid": 7,
    "reason": "stall", "time": 100.5, "offset": 3.5, "machine": "x",
    "error": "failed: Connection closed by peer", "failed": "allreduce.loss",
    "groups": {"0": [0, 1], "1": [1]}, "labels": {"loss": "the loss"},
    "calls": {"0": {"allreduce.loss": 3}}, "open": [CALL], "done": [CALL | {"ended": 99.5}],
    "stacks": 'Current thread 0x1 (most recent call first):\n  File "/a/train.py", line 3 in f\n',
}  # fmt: skip
FAILURE = {
    "rank": 1, "host": "host1", "status": 1, "signal": None, "exception": "ValueError: x",
    "traceback": ["Traceback (most recent call last):"], "last_lines": ["step 3"],
    "suspects": [0, 1], "possible_causes": None, "hint": "",
}  # fmt: skip
START = {
    "command": ["python", "train.py"], "directory": "/root/job", "hosts": {"host0": 1, "host1": 1},
    "launcher": "host0 7 1.00", "versions": {"hvdkit": "0.1.0"}, "began": 1795571141.0,
    "ended": 1795571241.0, "status": 1, "reason": "rank 1 failed", "failed": True, "saved": False,
    "hosts_changed": False, "verdict": False, "network": "host0 to host1", "version": 1,
}  # fmt: skip
OTHER = {
    "states.json": {"0": "stopped", "1": ""},
    "silent.json": ["host1 did not answer for 3 s."],
    "raised.json": {"0": "ValueError: x"},
}


def record_seeds() -> Sequence[bytes]:
    """Return files of a start, each with its name in the first line."""
    files = {
        "records/rank-0.json": RECORD,
        "error.json": FAILURE,
        "start.json": START,
        **{f"records/{name}": content for name, content in OTHER.items()},
    }
    found = [json.dumps([name, content]).encode() for name, content in files.items()]
    # A character that does not exist, a line of too many digits, and a path that is too long.
    for old, new in (("train", r"\Uffffffff"), ("3", "3" * 5000), ("a/", "a/" * 300_000)):
        changed = RECORD | {"stacks": RECORD["stacks"].replace(old, new)}
        found.append(json.dumps(["records/rank-0.json", changed]).encode())
    for number, hostile in enumerate(HOSTILE_JSON):
        name = list(files)[number % len(files)]
        found.append(name.encode() + b"\n" + hostile)
    return found


def _put(folder: Path, data: bytes) -> None:
    """Write the files of a start, one of them with an input."""
    (folder / "records").mkdir(exist_ok=True)
    for rank in range(2):
        content = json.dumps(RECORD | {"rank": rank})
        (folder / "records" / f"rank-{rank}.json").write_text(content)
    (folder / "error.json").write_text(json.dumps(FAILURE))
    (folder / "start.json").write_text(json.dumps(START))
    for name, content in OTHER.items():
        (folder / "records" / name).write_text(json.dumps(content))
    names = ["records/rank-0.json", "error.json", "start.json", *(f"records/{n}" for n in OTHER)]
    try:
        # Not `json.loads`: the memory of this function counts, too.
        name, content = parse_json(data)
        changed = json.dumps(content).encode()
    except (ValueError, TypeError, RecursionError):
        head, _, changed = data.partition(b"\n")
        name = head.decode(errors="replace")
    (folder / (name if name in names else names[len(data) % len(names)])).write_bytes(changed)


def parse_records(folder: Path, data: bytes) -> None:
    from hvdkit.faults.command import why

    _put(folder, data)
    shown(why(folder))


MONITOR = (
    b'{"type": "start", "version": 1, "step": 0, "time": 1795571141.0, "ranks": [0, 1], "every": '
    b'10, "host": "vm", "framework": "torch 2.13.0", "hvdkit": "0.1.0", "wire_formats": ["fp16"], '
    b'"units": {"time/step": "s", "loss": ""}}\n'
    b'{"type": "record", "step": 10, "steps": 10, "time": 1795571151.0, "samples": 64, "ranks": '
    b'[0, 1], "slowest": {"rank": 1, "seconds": 0.03, "median": 0.02, "section": "time/data"}, '
    b'"metrics": {"loss": {"mean": 1.0, "min": 1.0, "max": 1.0, "by_rank": [1.0, 1.0]}, '
    b'"time/step": {"mean": 0.05, "min": 0.05, "max": 0.05, "by_rank": [0.05, null], '
    b'"nonfinite": [1]}}}\n',
)


def monitor_seeds() -> Sequence[bytes]:
    begin = MONITOR[0]
    record = begin.splitlines()[1].replace(b"10,", b"%d,")
    many = b"\n".join(record.replace(b"%d,", b"%d," % step, 1) for step in range(2, 2000))
    return (
        begin,
        begin + begin.splitlines()[1].replace(b'"step": 10', b'"step": 20'),
        begin + many.replace(b"%d,", b"10,"),
        *(begin + each for each in HOSTILE_JSON),
    )


def parse_monitor(folder: Path, data: bytes) -> None:
    from hvdkit.monitor import read

    path = folder / "metrics.jsonl"
    path.write_bytes(data)
    read(path)


def parse_report(folder: Path, data: bytes) -> None:
    """The input is that of `parse_records` or of `parse_monitor`."""
    from hvdkit.report import page, single
    from hvdkit.report.gathering import gather

    place = folder / "run"
    start = place / "20261124-100000"
    start.mkdir(parents=True, exist_ok=True)
    is_metrics = data.startswith(b'{"type"')
    _put(start, b"" if is_metrics else data)
    (place / "metrics.jsonl").write_bytes(data if is_metrics else MONITOR[0])
    shown(page.write(single.document(gather(place))))


TIMELINE = (
    b'[\n{"name": "process_name", "ph": "M", "pid": 0, "args": '
    b'{"start_time_since_epoch_in_micros":1700000000000000}},\n'
    b'{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.x"}},\n'
    b'{"ph": "B", "name": "ALLREDUCE", "ts": 100, "pid": 1},{"ph": "E", "ts": 150, "pid": 1}]',
    *HOSTILE_JSON,
)


def timeline_seeds() -> Sequence[bytes]:
    head = TIMELINE[0].rpartition(b"{")[0]
    event = b'{"ph": "B", "name": "A", "ts": 100, "pid": 1},{"ph": "E", "ts": 150, "pid": 1},'
    return (*TIMELINE, head + event * 10_000, head + b"[" * 100_000, head + b"1" * 3_000_000)


def parse_timeline(folder: Path, data: bytes) -> None:
    from hvdkit.profiling import timeline

    path = folder / "timeline.json"
    path.write_bytes(data)
    timeline.read(path, 0, 0, 10**6, 17 * 10**17)


# Checkpoints.


def _step(folder: Path) -> Path:
    """Write a checkpoint, and return the folder of its step."""
    from tests.unit.checkpoint.material import save, step_folder

    return Path(step_folder(save(folder / "store", 1), 1))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def opened_manifest(folder: Path) -> Iterator[Parse]:
    """A manifest with any fields, and the correct hash."""
    from hvdkit.checkpoint.report import list_steps, show_step
    from hvdkit.checkpoint.store import Store
    from hvdkit.console.tables import Console
    from tests.unit.checkpoint.material import seal

    path = _step(folder) / "manifest.json"
    store = Store(str(folder / "store"))

    def parse(data: bytes) -> None:
        path.write_bytes(seal(data.decode(errors="replace")))
        out = io.StringIO()
        console = Console(file=out, width=200)
        list_steps(store, console)
        with contextlib.suppress(HvdkitError), store.newest_good(quarantine=False) as opened:
            show_step(opened, console)
        shown(out.getvalue())

    with _silent():
        yield parse


def manifest_seeds() -> Sequence[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        text = (_step(Path(folder)) / "manifest.json").read_text()
    fields = json.loads(text)
    del fields["xxh3_128"]
    late = fields | {"time": 1e300}
    # Numbers of equal hash.
    equal = fields | {"metrics": {"$dict": [[n * (2**61 - 1), 0] for n in range(30_000)]}}
    return (*(json.dumps(each).encode() for each in (fields, late, equal)), *HOSTILE_JSON)


CONTENT = ("state.json", "ranks.jsonl", "model.safetensors", "optimizer.safetensors")


@contextlib.contextmanager
def opened_checkpoint(folder: Path) -> Iterator[Parse]:
    """A file of a step, with the correct hash in the manifest. Its name is before the input."""
    from hvdkit.checkpoint import manifest, reading
    from hvdkit.checkpoint.store import Store
    from tests.unit.checkpoint.material import forge

    # States of 6 million values take 0.7 GB. With fewer, other growth is found.
    before, manifest.MAX_JSON_VALUES = manifest.MAX_JSON_VALUES, 400_000
    step = _step(folder)
    good = {path.name: path.read_bytes() for path in step.iterdir()}
    store = Store(str(folder / "store"))

    def parse(data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        file = name.decode(errors="replace")
        for each, whole in good.items():
            (step / each).write_bytes(whole)
        forge(step, {file if file in CONTENT else CONTENT[len(data) % 4]: content})
        for problem in store.verify(1):
            shown(str(problem))
        opened = store.newest_good(quarantine=False)
        if opened is not None:
            with opened:
                for part in opened.outline.trees:
                    opened.outline.tree(part)
                for rank in opened.ranks:
                    reading.rank_tree(rank)

    try:
        with _silent():
            yield parse
    finally:
        manifest.MAX_JSON_VALUES = before


def same_names(length: int) -> dict[str, Any]:
    """Return a tree with 2**(length - 1) tensors whose paths all give the same name."""
    return {
        ".".join("a" * n): same_names(length - n) if n < length else {"$tensor": "empty"}
        for n in range(1, length + 1)
    }


def checkpoint_seeds() -> Sequence[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        step = _step(Path(folder))
        files = {name: (step / name).read_bytes() for name in CONTENT}
    huge = b'{"a":{"dtype":"F32","shape":[9223372036854775807,9],"data_offsets":[0,0]}}'
    header = struct.pack("<Q", len(huge)) + huge
    found = [*files.items(), ("model.safetensors", header)]
    found += [("ranks.jsonl", b"{}\n" + each + b"\n") for each in HOSTILE_JSON]
    found += [("state.json", each) for each in HOSTILE_JSON]
    state = json.loads(files["state.json"]) | {"model": same_names(14)}
    found.append(("state.json", json.dumps(state).encode()))
    return [name.encode() + b"\n" + data for name, data in found]


@contextlib.contextmanager
def opened_log(folder: Path) -> Iterator[Parse]:
    """The log of a store of an earlier version, with any fields and the correct hash."""
    from hvdkit.checkpoint.objects.bucket import Bucket
    from hvdkit.checkpoint.store import Store
    from tests.unit.checkpoint.material import save, seal

    url = f"memory://{secrets.token_hex(4)}/run"
    save(url, 1, 2)
    bucket = Bucket(url, {})

    def parse(data: bytes) -> None:
        # Larger ones are not read, whatever their hash is.
        content = data if len(data) > 1_000_000 else seal(data.decode(errors="replace"))
        bucket.write("log/00000000000000000005.json", content)
        for entry in Store(url).entries():
            shown(str(entry.error or ""))

    with _silent():
        yield parse
    bucket.delete(list(bucket.sizes()))


def log_seeds() -> Sequence[bytes]:
    recorded = Path(__file__).parents[2] / "unit/checkpoint/earlier/log/00000000000000000005.json"
    fields = json.loads(recorded.read_bytes())
    del fields["xxh3_128"]
    return (json.dumps(fields).encode(), b" " * 17_000_000, *HOSTILE_JSON)


@contextlib.contextmanager
def opened_s3(folder: Path) -> Iterator[Parse]:
    """A server of S3 whose answers are the input: a status, and the content."""
    import s3fs

    from hvdkit.checkpoint.objects import bucket
    from hvdkit.checkpoint.store import Store

    answer = [b""]

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            status, _, content = answer[0].partition(b"\n")
            self.send_response(int(status) if status.isdigit() and len(status) == 3 else 200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/xml")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    options = {
        "key": "tests",
        "secret": "tests",
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{server.server_port}"},
    }
    limits = "FIRST_RETRY_SECONDS", "RETRY_SECONDS", "FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"
    before = {name: getattr(bucket, name) for name in limits}
    for name in limits:
        setattr(bucket, name, 0.0)
    retries, s3fs.S3FileSystem.retries = s3fs.S3FileSystem.retries, 1
    store = Store("s3://checkpoints/run", storage_options=options)

    def parse(data: bytes) -> None:
        answer[0] = data
        for entry in store.entries():
            shown(str(entry.error or ""))

    try:
        with _silent():
            yield parse
    finally:
        for name, value in before.items():
            setattr(bucket, name, value)
        s3fs.S3FileSystem.retries = retries
        server.shutdown()
        thread.join()
        server.server_close()


def s3_seeds() -> Sequence[bytes]:
    name = "run/log/00000000000000000001.json"
    listing = (
        '200\n<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns='
        '"http://s3.amazonaws.com/doc/2006-03-01/"><Name>checkpoints</Name><Prefix>run/log</Prefix>'
        "<KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated><Contents>"
        f"<Key>{name}</Key><LastModified>2026-11-29T10:00:00.000Z</LastModified>"
        '<ETag>"d41d8cd98f00b204e9800998ecf8427e"</ETag><Size>434</Size><StorageClass>STANDARD'
        "</StorageClass></Contents></ListBucketResult>"
    ).encode()
    error = (
        b'404\n<?xml version="1.0" encoding="UTF-8"?><Error><Code>NoSuchBucket</Code><Message>The '
        b"specified bucket does not exist</Message></Error>"
    )
    entities = (
        b'200\n<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "'
        + b"x" * 1000
        + b'"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;"><!ENTITY d "&c;&c;&c;&c;&c;&c;&c;&c;">'
        b'<!ENTITY e "&d;&d;&d;&d;&d;&d;&d;&d;&d;&d;&d;&d;&d;&d;">]><a>&e;&e;&e;&e;</a>'
    )
    return (
        listing,
        listing.replace(b"434", b"9" * 400),
        listing.replace(b"434", b"90000000"),
        listing.replace(b"<IsTruncated>false", b"<IsTruncated>true"),
        error,
        entities,
        b"200\n" + b"<a>" * 100_000,
        *(b"200\n" + seed for seed in log_seeds()[:1]),
    )


# Scripts.

SCRIPTS = (
    """\
import torch
import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(3):
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    if hvd.rank() == 0:
        print(loss.data[0])
""",
    """\
import horovod.tensorflow.keras as hvd
from tensorflow import keras

hvd.init()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(lr=0.1))
model.compile(optimizer=optimizer, loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(x, y, callbacks=callbacks, verbose=1 if hvd.rank() == 0 else 0)
""",
    """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(model.cuda(), device_ids=[rank])
sampler = torch.utils.data.distributed.DistributedSampler(data)
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "a.pt")
""",
)


def script_seeds() -> Sequence[bytes]:
    head = "import horovod.torch as hvd\n"
    texts = [
        *SCRIPTS,
        head + "x = " + "(" * 150 + "1" + ")" * 150,
        head + "x = " + "-" * 5000 + "1",
        head + "x = " + "+".join(["a"] * 3000),
        head + "x = " + "[" * 5000,
        head + "import horovod." + "a" * 5000,
        head + "x = 'a\u202eb\x1b]0;x\x07'",
        head + "".join(" " * n + "if x:\n" for n in range(150)) + " " * 150 + "pass\n",
    ]
    return [text.encode() for text in texts]


def parse_script(folder: Path, data: bytes) -> None:
    from hvdkit.migrate import project

    # The memory is proportional to the length.
    text = data[:100_000].decode("utf-8", "replace")
    for outcome in project.migrate({folder / "train.py": text}).values():
        if outcome.before != outcome.after:
            ast.parse(outcome.after)


# Files of options.

YAML = (
    b"params:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 3.5\n  hierarchical_allreduce: true\n"
    b"autotune:\n  enabled: true\n  log_file: log\ntimeline:\n  filename: 't.json'\n"
    b"stall_check:\n  enabled: false\nlibrary_options:\n  gloo_timeout_seconds: 30\n"
    b"logging:\n  level: DEBUG\n  with_timestamp: false\ncontroller: gloo\n",
    b"a: &a [x, x]\nparams:\n  cache_capacity: *a\n",
    b"a: &a {b: 1}\nparams:\n  <<: [*a, *a]\n",
    b"params:\n  cache_capacity: " + b"9" * 6000,
    b"[" * 10_000,
    b"{a: [" + b"x," * 9_000 + b"]}",
    b"".join(b"a%d: 1\n" % i for i in range(2000)),
    b'"\\e[2J\\u202e": 1\n',
    b"a: !!python/object/apply:os.abort []\n? [b]\n: 2020-01-01\n",
)
TOML = (
    b'num-proc = 8\nhosts = "a:4,b:4"\nx = ["A=1", "B"]\nall-output = true\nstop-grace = 1e3\n'
    b'blacklist-cooldown-range = [1, 2]\ncommand = ["python", "train.py"]\n',
    b"num-proc = " + b"9" * 6000,
    b"command = " + b"[" * 100_000,
    b"a" + b".a" * 40_000 + b" = 1",
    b"a" + b".a" * 15_000 + b" = 1",
    b'x = ["' + b'", "'.join([b"a"] * 9_000) + b'"]\n',
)


def parse_yaml(folder: Path, data: bytes) -> None:
    from hvdkit.launch.options import horovodrun

    (folder / "options.yaml").write_bytes(data)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        words = ["-np", "1", "--config-file", str(folder / "options.yaml"), "true"]
        horovodrun.translate(horovodrun.read(words, {}))
    shown(told.getvalue())


def parse_toml(folder: Path, data: bytes) -> None:
    from hvdkit.launch.options import arguments, config_file

    (folder / "options.toml").write_bytes(data)
    parser = argparse.ArgumentParser(exit_on_error=False)
    arguments.add_arguments(parser)
    told = io.StringIO()
    # argparse ends the process after an error of the values.
    with contextlib.redirect_stderr(told), contextlib.suppress(SystemExit, argparse.ArgumentError):
        config_file.parse_with(folder / "options.toml", parser, [])


# The end of a job.


def event_seeds() -> Sequence[bytes]:
    recorded = Path(__file__).parents[2] / "unit" / "launch" / "recorded"
    real = [file.read_bytes() for file in sorted(recorded.iterdir())]
    no_status = [text.replace(b'"status": -', b'"status": -9223372036854775') for text in real]
    return [*real, *no_status, *HOSTILE_JSON]


def parse_events(folder: Path, data: bytes) -> None:
    from hvdkit.launch.ending import events
    from hvdkit.launch.ending.outcome import outcome

    shown(printable(outcome(*events.parse(data.decode(errors="replace"))).report))


#: All parsers, by name.
PARSERS: dict[str, Parser] = {
    "hosts": Parser(lambda: HOSTS, simple(parse_hosts), ()),
    "discovery": Parser(lambda: HOSTS, simple(parse_discovery), (UsageError,)),
    "batch": Parser(lambda: BATCH, simple(parse_batch), ()),
    "message": Parser(lambda: MESSAGES, simple(parse_message), (ValueError,)),
    "rendezvous-file": Parser(
        lambda: RENDEZVOUS_FILE, simple(parse_rendezvous_file), (OSError, HvdkitError)
    ),
    "lease": Parser(lease_seeds, simple(parse_lease), ()),
    "records": Parser(record_seeds, simple(parse_records)),
    "monitor": Parser(monitor_seeds, simple(parse_monitor)),
    # A page takes about a second. The other seeds are those of `records` and `monitor`.
    "report": Parser(lambda: [*record_seeds()[:3], *monitor_seeds()[:2]], simple(parse_report)),
    "timeline": Parser(timeline_seeds, simple(parse_timeline)),
    "manifest": Parser(manifest_seeds, opened_manifest),
    "checkpoint": Parser(checkpoint_seeds, opened_checkpoint),
    "log": Parser(log_seeds, opened_log),
    "s3": Parser(s3_seeds, opened_s3),
    "events": Parser(event_seeds, simple(parse_events)),
    "yaml": Parser(lambda: YAML, simple(parse_yaml), (UsageError,)),
    "toml": Parser(lambda: TOML, simple(parse_toml), (UsageError,)),
    "script": Parser(script_seeds, simple(parse_script), ()),
}
