from dataclasses import replace

import pytest

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.control.network import LOOPBACK, Interface
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from hvdkit.launch.launchers import mpi
from hvdkit.mpi.mpirun import Mpirun

A, B = Host("a", 2), Host("b", 4)
TWO_HOSTS = {A: Interface("eth0", "10.0.0.1", 24), B: Interface("ens3", "10.0.0.2", 24)}


def words(mpirun, interfaces, **options):
    plan = make_plan(["train"], "/work", list(interfaces), sum(h.slots for h in interfaces))
    given = {"variables": ["PATH", "SECRET"], "ssh": Ssh(port=2222)}
    return mpi.mpirun_command(
        mpirun, plan, plan.command, interfaces=interfaces, **(given | options)
    )


def after(command, option):
    return [command[i + 1] for i, word in enumerate(command) if word == option]


@pytest.mark.parametrize("major", [4, 5])
def test_open_mpi_on_two_hosts(major):
    command = words(Mpirun("/opt/mpi/bin/mpirun", True, major), TWO_HOSTS)
    assert command[:3] == ["/opt/mpi/bin/mpirun", "-n", "6"]
    assert command[-1] == "train"
    assert after(command, "-H") == ["a:2,b:4"]
    assert after(command, "-x") == ["PATH", "SECRET"]
    assert after(command, "--bind-to") == ["none"]
    assert after(command, "--prefix") == ["/opt/mpi"]
    # The names of the interfaces differ, the subnet does not.
    assert "btl_tcp_if_include" in command
    assert "10.0.0.0/24" in command
    assert "eth0" not in command
    ssh = command[command.index("plm_ssh_args" if major == 5 else "plm_rsh_args") + 1]
    assert ssh.startswith("-p 2222 ")
    assert ("^openib" in command) == (major == 4)


def test_open_mpi_5_gets_the_name_of_the_interface_if_it_is_the_same_on_all_hosts():
    interfaces = {A: Interface("ib0", "10.0.0.1", 24), B: Interface("ib0", "10.0.0.2", 24)}
    command = words(Mpirun("/opt/mpi/bin/mpirun", True, 5), interfaces)
    assert after(command, "prte_if_include") == ["ib0"]
    assert after(command, "btl_tcp_if_include") == ["10.0.0.0/24"]
    # A second address of an interface has a name that PRRTE does not know.
    interfaces = {host: replace(each, name="ib0:1") for host, each in interfaces.items()}
    command = words(Mpirun("/opt/mpi/bin/mpirun", True, 5), interfaces)
    assert after(command, "prte_if_include") == ["10.0.0.0/24"]


def test_open_mpi_on_one_host_needs_no_network():
    command = words(Mpirun("mpirun", True, 5), {Host("localhost", 2): LOOPBACK})
    assert after(command, "-H") == ["localhost:2"]
    assert "btl_tcp_if_include" not in command


def test_hydra_on_two_hosts(monkeypatch):
    monkeypatch.setattr(mpi.network, "own_interfaces", lambda: [TWO_HOSTS[A]])
    command = words(Mpirun("/opt/bin/mpirun", False, 0), TWO_HOSTS)
    assert after(command, "-hosts") == ["a:2,b:4"]
    assert after(command, "-iface") == ["eth0"]
    assert after(command, "-genvlist") == ["PATH,SECRET"]
    assert command[-1] == "train"


def test_the_users_arguments_come_last():
    command = words(Mpirun("mpirun", True, 5), TWO_HOSTS, extra=["--bind-to", "core"])
    # Open MPI 5 refuses an option that is given twice.
    assert after(command, "--bind-to") == ["core"]
    assert after(command, "--map-by") == ["slot"]
    assert command[-3:] == ["--bind-to", "core", "train"]
    command = words(Mpirun("mpirun", True, 5), TWO_HOSTS, extra=["--rankfile", "file"])
    assert not after(command, "--map-by")


def test_the_users_values_of_variables_are_used():
    command = words(Mpirun("mpirun", True, 5), TWO_HOSTS, extra=["-x", "PATH=/own", "-x", "SECRET"])
    assert after(command, "-x") == ["PATH=/own", "SECRET"]


def test_a_missing_mpi(monkeypatch):
    monkeypatch.setattr(mpi, "which", lambda name: None)
    with pytest.raises(HvdkitError, match="there is no mpirun here"):
        mpi.find()
    with pytest.raises(HvdkitError, match="there is no /no/mpirun here"):
        mpi.find("/no/mpirun")


def test_an_argument_for_ssh_with_a_blank_is_refused():
    ssh = Ssh(arguments=["-oProxyCommand=nc %h %p"])
    with pytest.raises(UsageError, match=r"ProxyCommand=nc %h %p.*~/.ssh/config"):
        words(Mpirun("/mpi/bin/mpirun", True, 5), TWO_HOSTS, ssh=ssh)
