import pytest

from hvdkit.launch.control.agent_command import agent_command
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh

SSH = Ssh(port=2222, identity="/k e y", arguments=["-Jgateway"])


def test_ssh_asks_nothing_and_the_users_arguments_come_first():
    command = SSH.command(Host("me@h", 1), ["python", "-m", "x y"])
    assert command[:6] == ["ssh", "-Jgateway", "-p", "2222", "-i", "/k e y"]
    assert "-oBatchMode=yes" in command
    assert command[-2:] == ["me@h", "cd / && exec python -m 'x y'"]


NO_KEY = "Warning: Identity file /k e y not accessible: No such file or directory.\n"
CHANGED = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."
DENIED = "me@h: Permission denied (publickey)."
REFUSED = "ssh: connect to host h port 2222: Connection refused"


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (255, "Host key verification failed.", "ssh-keyscan -p 2222 h >> ~/.ssh/known_hosts"),
        (255, CHANGED, "ssh-keygen -R '[h]:2222'"),
        (255, DENIED, "ssh-copy-id -oProxyJump=gateway -p 2222 -i '/k e y' me@h"),
        (255, NO_KEY + DENIED, "the file of --ssh-identity cannot be read"),
        (255, NO_KEY + REFUSED, "no ssh server listens"),
        (255, "ssh: Could not resolve hostname h: Name or service not known", "/etc/hosts"),
        (255, REFUSED, "no ssh server listens"),
        (255, "ssh: connect to host h port 2222: Connection timed out", "cannot be reached"),
        (127, "sh: 1: exec: /py: not found", "there is no executable Python at /py"),
        (126, "sh: 1: exec: /py: Permission denied", "there is no executable Python at /py"),
        (1, "/py: No module named hvdkit", "/py there has no hvdkit"),
        (1, "ModuleNotFoundError: No module named 'psutil'", "/py there has no hvdkit"),
        (1, "new", "ssh ended with status 1; try `ssh -Jgateway -p 2222 -i '/k e y' me@h true`"),
        (None, "", "ssh has not ended"),
        # Killed before the start of the agent.
        (-9, "", "was killed by signal 9"),
    ],
)
def test_each_error_of_ssh_has_advice(status, said, expected):
    text = SSH.explain(Host("me@h", 1), status, said, "/py")
    assert expected in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("ssh: connect to host 10.0.0.7 port 2200: Connection refused", "on port 2200 there"),
        (
            "No ED25519 host key is known for [h.lab]:2200 and you have requested strict "
            "checking.\nHost key verification failed.",
            "ssh-keyscan -p 2200 h.lab >>",
        ),
        (
            "REMOTE HOST IDENTIFICATION HAS CHANGED!\n  ssh-keygen -f '/k' -R '[h.lab]:2200'\n"
            "Host key verification failed.",
            "ssh-keygen -R '[h.lab]:2200'",
        ),
    ],
)
def test_advice_has_the_name_and_port_of_sshs_configuration(said, expected):
    assert expected in Ssh().explain(Host("h", 1), 255, said, "/py")


@pytest.mark.parametrize("name", ["$(id)", "x';id;'", "`id`", "-f/etc/passwd", "a;id"])
@pytest.mark.parametrize(
    "said",
    [
        "ssh: connect to host {} port 22: Connection refused",
        "No ED25519 host key is known for [{}]:22 and you have requested strict checking.",
        "REMOTE HOST IDENTIFICATION HAS CHANGED! ssh-keygen -R '[{}]:22'",
    ],
)
def test_advice_has_no_commands_of_a_server_without_a_known_key(said, name):
    # ssh shows the text with which a server disconnects, also before it knows the server.
    text = f"Received disconnect from 10.0.0.7 port 22:2: {said.format(name)}"
    advice, _, _ = Ssh().explain(Host("h", 1), 255, text, "/py").rpartition(" (")
    assert name not in advice


def test_commands_for_the_user_have_addresses_and_arguments_that_the_programs_accept():
    ssh = Ssh(arguments=["-J", "gateway", "-vA", "-oUser=me"])
    host = Host("me@[fd00::1]", 1)
    assert ssh.by_hand("ssh", host) == "ssh -J gateway -vA -oUser=me me@fd00::1"
    assert (
        ssh.by_hand("ssh-copy-id", host) == "ssh-copy-id -oProxyJump=gateway -oUser=me me@fd00::1"
    )


def test_agents_on_other_hosts_get_the_search_paths_of_this_process(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/modules/my torch")
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    command = agent_command(Host("host1", 1), False, Ssh(), "/opt/python")
    assert command[-1] == (
        "cd / && exec env 'PYTHONPATH=/modules/my torch' /opt/python -P -m hvdkit.launch.agent.main"
    )


@pytest.mark.parametrize(
    ("status", "said", "transient", "lost"),
    [
        (255, "kex_exchange_identification: Connection closed by remote host", True, True),
        (255, "Connection reset by 10.0.0.7 port 22", True, True),
        (255, "Timeout, server h not responding.", False, True),
        (255, "me@h: Permission denied (publickey).", False, False),
        (1, "Connection closed by 10.0.0.7", False, False),
        (None, "Connection closed by 10.0.0.7", False, False),
    ],
)
def test_refused_and_lost_connections_are_told_apart(status, said, transient, lost):
    assert Ssh().failed_transiently(status, said) == transient
    assert Ssh().lost_connection(status, said) == lost
