"""The kind of an exception that a rank reports."""

import importlib.util
from pathlib import Path

import pytest

import hvdkit.launch

FILE = Path(hvdkit.launch.__file__).parent / "agent" / "hook" / "_hvdkit_self_report.py"


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("self_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_class(name, base=RuntimeError):
    module, _, name = name.rpartition(".")
    return type(name, (base,), {"__module__": module})


ENGINE = of_class("horovod.common.exceptions.HorovodInternalError")
TENSORFLOW = of_class("tensorflow.python.framework.errors_impl.OpError", Exception)
UNKNOWN = type("UnknownError", (TENSORFLOW,), {"__module__": TENSORFLOW.__module__})
SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"
GLOO = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1.2.3]:3985"


def caused(error, cause):
    error.__cause__ = cause
    return error


def handled(error, context, suppress):
    error.__context__, error.__suppress_context__ = context, suppress
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ENGINE(SHUT_DOWN), "peer"),
        (ENGINE("collective in shared memory: rank 1 has ended"), "peer"),
        (ENGINE("collective over the network, waiting for rank 3: timed out"), "peer"),
        (ENGINE(GLOO), "peer"),
        (ENGINE("Mismatched allreduce tensor shapes"), "own"),
        # The rank itself has failed in the collective.
        (ENGINE("CUDA error: an illegal memory access was encountered"), "own"),
        (UNKNOWN(SHUT_DOWN), "peer"),
        (UNKNOWN("OOM when allocating tensor"), "own"),
        (of_class("torch.distributed.DistBackendError")("NCCL error"), "peer"),
        (RuntimeError(GLOO), "peer"),
        (ConnectionResetError(104, "Connection reset by peer"), "connection"),
        (ValueError("bad"), "own"),
        (caused(RuntimeError("step 7 failed"), ENGINE(SHUT_DOWN)), "peer"),
        (handled(KeyError("metric"), ENGINE(SHUT_DOWN), False), "peer"),
        (handled(KeyError("metric"), ENGINE(SHUT_DOWN), True), "peer"),
        (ExceptionGroup("of workers", [ENGINE(SHUT_DOWN), ENGINE(SHUT_DOWN)]), "peer"),
        (ExceptionGroup("of workers", [ENGINE(SHUT_DOWN), ValueError("bad")]), "own"),
    ],
    ids=str,
)
def test_the_kind_of_an_exception(report, error, kind):
    assert report._kind(error) == kind


@pytest.mark.parametrize(("function", "kind"), [("init", "start"), ("allreduce", "refused")])
def test_the_kind_of_an_error_of_horovods_python_code(report, function, kind):
    space = {"__name__": "horovod.common.basics"}
    exec(f"def {function}(): raise ValueError('Horovod initialization failed')", space)
    with pytest.raises(ValueError, match="failed") as error:
        space[function]()
    assert report._kind(error.value) == kind


def test_a_chain_of_exceptions_without_end(report):
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert report._kind(first) == "own"


def test_a_report_does_not_follow_a_link(report, tmp_path):
    reporter = report._Reporter(str(tmp_path), 0)
    precious = tmp_path / "precious"
    precious.write_text("content")
    Path(f"{reporter._file}.new").symlink_to(precious)
    reporter._write("end", None)
    assert precious.read_text() == "content"
    assert not Path(reporter._file).exists()
