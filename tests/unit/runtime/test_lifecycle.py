"""Starting a simulated Horovod. tests/unit/torch and other tests start a real one."""

import logging
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.runtime import record_files
from hvdkit.runtime.lifecycle import (
    Runtime,
    loading,
)

OURS = SimpleNamespace(version="0.28.1+hvdkit.2", frameworks={"torch": "2.13.0"}, ours=True)
STOCK = SimpleNamespace(version="0.28.1", frameworks={"torch": "2.13.0"}, ours=False)


class SimulatedHorovod:
    """A simulated mpi_ops that records its calls and the environment variables at each call."""

    #: The extension of an engine without shared memory.
    _basics = SimpleNamespace(
        MPI_LIB_CTYPES=SimpleNamespace(horovod_start_timeline=None), init=lambda: None
    )

    def __init__(self, size=1, rank=0, mpi=True, gloo=True, local=(0, 1)):
        self._local = local
        self._size, self._rank, self._mpi, self._gloo = size, rank, mpi, gloo
        self.calls = []
        self._initialized = False

    def is_initialized(self):
        return self._initialized

    def init(self, *args, **kwargs):
        self._initialized = True
        self.calls.append(("init", args, kwargs, os.environ.get("HOROVOD_CONTROLLER")))

    def shutdown(self):
        self._initialized = False
        self.calls.append(("shutdown",))

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def local_rank(self):
        return self._local[0]

    def local_size(self):
        return self._local[1]

    def mpi_built(self):
        return self._mpi

    def gloo_built(self):
        return self._gloo


def runtime_of(horovod, version="2.13.0", engine=OURS, use_own_gpu=lambda local_rank: None):
    def torchrun_variables():
        return {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}

    return Runtime("torch", version, engine, horovod, use_own_gpu, torchrun_variables)


@pytest.fixture
def no_launcher(monkeypatch):
    """An environment without variables of launchers."""
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "MV2_")):
            monkeypatch.delenv(name)
    # monkeypatch removes variables that `init` sets only if they are set here.
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "600")
    return monkeypatch


@pytest.mark.parametrize(
    ("arguments", "gloo", "controller"),
    [({}, True, "gloo"), ({}, False, None), ({"comm": [0]}, True, None)],
)
def test_jobs_that_start_over_gloo(no_launcher, arguments, gloo, controller):
    horovod = SimulatedHorovod(gloo=gloo)
    runtime_of(horovod).init(**arguments)
    assert horovod.calls == [("init", (), arguments, controller)]
    assert "HOROVOD_CONTROLLER" not in os.environ


@pytest.mark.parametrize(
    ("horovod", "controller", "message"),
    [
        (SimulatedHorovod(size=3, mpi=False), "", "has no MPI to connect them"),
        (SimulatedHorovod(size=3), "gloo", "HOROVOD_CONTROLLER is gloo"),
        (SimulatedHorovod(size=1), "", "but each formed its own job"),
    ],
)
def test_processes_that_cannot_become_one_job(no_launcher, horovod, controller, message):
    no_launcher.setenv("PMI_SIZE", "3")
    no_launcher.setenv("HOROVOD_CONTROLLER", controller)
    runtime = runtime_of(horovod)
    with pytest.raises(HvdkitError, match=message):
        runtime.init()
    assert runtime.generation == 0
    # Horovod does not keep running after the error.
    assert [call[0] for call in horovod.calls] in ([], ["init", "shutdown"])


@pytest.mark.parametrize(
    ("arguments", "noted"),
    [
        ({}, {record_files.ENTERED.format(1), record_files.CONNECTED.format(1)}),
        # Ranks outside of `comm` need not call `init`.
        ({"comm": [0, 1]}, set()),
    ],
)
def test_a_rank_notes_how_far_init_is(no_launcher, tmp_path, arguments, noted):
    no_launcher.setenv("PMI_SIZE", "3")
    no_launcher.setenv("HVDKIT_RECORD_DIR", str(tmp_path))
    horovod = SimulatedHorovod(size=3)
    runtime = runtime_of(horovod)
    runtime.init(**arguments)
    assert {path.name for path in tmp_path.glob("init*")} == noted
    leaving = tmp_path / record_files.LEAVING.format(len(noted) // 2)
    horovod.shutdown = lambda: horovod.calls.append(leaving.exists())
    runtime.shutdown()
    assert horovod.calls[-1] is True
    # The script may continue without Horovod.
    assert not leaving.exists()


def test_a_relative_folder_for_records(no_launcher, monkeypatch, tmp_path):
    """The script may change its working directory afterwards."""
    monkeypatch.chdir(tmp_path)
    no_launcher.setenv("HVDKIT_RECORD_DIR", "records")
    runtime_of(SimulatedHorovod()).init()
    assert os.environ["HVDKIT_RECORD_DIR"] == str(tmp_path / "records")


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be tried by root")
@pytest.mark.parametrize("danger", ["of another user", "anyone can write", "link of another user"])
def test_a_folder_for_records_in_which_other_users_can_put_links(
    no_launcher, tmp_path, caplog, danger
):
    """Through a link, a rank would write to any file of its user."""
    folder = tmp_path / "records"
    folder.mkdir()
    if danger == "anyone can write":
        folder.chmod(0o1777)
    else:
        os.chown(folder, 65534, 65534)
    given = folder
    if danger == "link of another user":
        given = tmp_path / "link"
        given.symlink_to(folder)
    no_launcher.setenv("HVDKIT_RECORD_DIR", str(given))
    runtime = runtime_of(SimulatedHorovod(size=2))
    runtime.init()
    runtime.shutdown()
    assert not list(folder.iterdir())
    assert "HVDKIT_RECORD_DIR" not in os.environ
    assert f"cannot write to {given}: other users can make files in it" in caplog.text


def test_init_refuses_an_unknown_choice_of_collectives(no_launcher):
    no_launcher.setenv("HVDKIT_COLLECTIVES", "ring")
    horovod = SimulatedHorovod()
    with pytest.raises(UsageError, match="HVDKIT_COLLECTIVES is 'ring': expected flat"):
        runtime_of(horovod).init()
    assert not horovod.calls


def test_rank_0_logs_why_collectives_are_flat(no_launcher, caplog):
    caplog.set_level(logging.INFO, "hvdkit")
    no_launcher.setenv("PMI_SIZE", "2")
    for rank in (1, 0):
        runtime_of(SimulatedHorovod(size=2, rank=rank)).init()
    assert caplog.messages == [
        "buckets are reduced through sockets: the engine was not built by `hvdkit build`, or by an "
        "older one"
    ]


@pytest.mark.parametrize(("local", "told"), [((1, 2), [1]), ((0, 2), [0]), ((0, 1), [])])
def test_ranks_that_share_a_host_share_out_its_gpus(no_launcher, local, told):
    seen = []
    runtime_of(SimulatedHorovod(local=local), use_own_gpu=seen.append).init()
    assert seen == told


def test_init_and_join_increase_the_generation(no_launcher):
    runtime = runtime_of(SimulatedHorovod())
    seen = [runtime.generation]
    for start in (runtime.init, runtime.shutdown, runtime.init, runtime.begin_generation):
        start()
        seen.append(runtime.generation)
    assert seen == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("engine", "version", "rank", "said"),
    [
        (OURS, "2.13.0", 0, []),
        (STOCK, "2.13.0", 0, ["was not built by `hvdkit build`"]),
        (OURS, "2.14.0", 0, ["was built for torch 2.13.0, but torch 2.14.0 is installed"]),
        (STOCK, "2.14.0", 1, []),
    ],
)
def test_missing_features_of_the_engine_are_logged_once(
    no_launcher, caplog, engine, version, rank, said
):
    runtime = runtime_of(SimulatedHorovod(rank=rank), version, engine)
    with caplog.at_level(logging.WARNING, logger="hvdkit.torch"):
        runtime.init()
        runtime.shutdown()
        runtime.init()
    assert len(caplog.messages) == len(said)
    assert all(part in message for part, message in zip(said, caplog.messages, strict=True))


def test_an_extension_that_does_not_load(monkeypatch):
    monkeypatch.delitem(sys.modules, "horovod.tensorflow.mpi_ops", raising=False)
    with (
        pytest.raises(ImportError, match=r"built for torch 2\.13\.0 .* torch 2\.14\.0 \(no _Z"),
        loading("torch", "2.14.0", OURS),
    ):
        raise ImportError("no _ZN3c10")


def test_one_extension_per_process(monkeypatch):
    name = "horovod.tensorflow.mpi_ops"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    entered = False
    with (
        pytest.raises(ImportError, match=r"either hvdkit\.torch or hvdkit\.tensorflow"),
        loading("torch", "2.13.0", OURS),
    ):
        entered = True
    assert not entered


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


def test_ranks_of_torchrun_get_their_place_before_horovod_starts(no_launcher, monkeypatch):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HOROVOD_RANK", "HOROVOD_SIZE"):
        # monkeypatch removes them after the test only if they are changed here.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    runtime_of(SimulatedHorovod(size=2)).init()
    assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == ("1", "2")


def test_torchrun_needs_gloo(no_launcher, monkeypatch):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        HvdkitError, match="torchrun started 2 ranks, but the installed Horovod .* no Gloo"
    ):
        runtime_of(SimulatedHorovod(size=2, gloo=False)).init()


def test_one_rank_of_torchrun_on_each_of_several_slurm_tasks(no_launcher, monkeypatch):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    runtime_of(SimulatedHorovod(size=1, mpi=False)).init()


def test_a_call_of_init_by_one_rank_that_has_started_is_no_new_start(no_launcher, tmp_path):
    """Otherwise the launcher over MPI would wait for the other ranks, and then end the job."""
    no_launcher.setenv("HVDKIT_RECORD_DIR", str(tmp_path))
    runtime = runtime_of(SimulatedHorovod(size=2))
    runtime.init()
    generation = runtime.generation
    runtime.init()
    assert not list(tmp_path.glob("init-2-*"))
    assert runtime.generation == generation  # the ranks compare it
    runtime.shutdown()
    runtime.init()
    assert len(list(tmp_path.glob("init-2-*"))) == 2


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_only_ranks_over_mpi_need_mpi(no_launcher, controller):
    """The script has finalized MPI itself."""

    def finalized(flag):
        flag._obj.value = 1

    horovod = SimulatedHorovod(size=2)
    no_launcher.setattr(horovod._basics.MPI_LIB_CTYPES, "MPI_Finalized", finalized, raising=False)
    no_launcher.setenv("HOROVOD_CONTROLLER", controller)
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "2" if controller == "mpi" else "1")
    if controller == "mpi":
        with pytest.raises(HvdkitError, match="has finalized MPI"):
            runtime_of(horovod).init()
    else:
        runtime_of(horovod).init()
