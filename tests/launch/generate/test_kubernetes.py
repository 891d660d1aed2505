"""The generated MPIJob fits the schemas of Kubernetes, and a description of mpi-operator's fields.

kubernetes-validate has the schemas of Kubernetes. mpi-operator publishes its schema only in its
repository. To validate every job against it too, name a copy of the file
manifests/base/kubeflow.org_mpijobs.yaml in HVDKIT_MPIJOB_CRD.
"""

import os
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from hvdkit.cli import main
from hvdkit.launch.generate.kubernetes import pod as generated_pod
from hvdkit.launch.hosts import Host, read_hostfile
from hvdkit.launch.timeouts import Timeouts

CRD = os.environ.get("HVDKIT_MPIJOB_CRD")

SMALL = ["--image", "registry/train:1"]
LARGE = [
    *SMALL,
    *("--name", "large", "--namespace", "research", "--workers", "16", "--gpus-per-worker", "8"),
    *("--cpus", "64", "--memory", "512Gi", "--shared-memory", "64Gi", "--checkpoints", "my-claim"),
    *("--retries", "5", "--queue", "gold", "--rdma", "rdma/hca=1"),
    *("--node-selector", "pool=h100", "--toleration", "nvidia.com/gpu:NoSchedule"),
]
JOBS = pytest.mark.parametrize("arguments", [SMALL, LARGE], ids=["small", "large"])


def closed(properties, *required):
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
REPLICAS = closed(
    # The operator refuses policies other than these two. Templates are those of Kubernetes.
    {"replicas": COUNT, "restartPolicy": {"enum": ["Never", "OnFailure"]}, "template": {}},
    "template",
)
#: The operator's part of kubeflow.org/v2beta1's MPIJob, from its documentation.
MPI_JOB = closed(
    {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "kind": {"const": "MPIJob"},
        "metadata": {"type": "object"},
        "spec": closed(
            {
                "slotsPerWorker": COUNT,
                "runLauncherAsWorker": {"type": "boolean"},
                "sshAuthMountPath": TEXT,
                "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "mpiReplicaSpecs": closed({"Launcher": REPLICAS, "Worker": REPLICAS}, "Launcher"),
                "runPolicy": closed(
                    {
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "ttlSecondsAfterFinished": COUNT,
                        "activeDeadlineSeconds": COUNT,
                        "backoffLimit": COUNT,
                        "suspend": {"type": "boolean"},
                        "managedBy": TEXT,
                        "schedulingPolicy": {"type": "object"},
                    }
                ),
            },
            "mpiReplicaSpecs",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)


@pytest.fixture
def generate(tmp_path):
    def text(*arguments, command=("python", "train.py")):
        path = tmp_path / "job.yaml"
        path.unlink(missing_ok=True)
        assert main(["generate", "kubernetes", *arguments, "-o", str(path), *command]) == 0
        return path.read_text()

    return text


def mpi_job_of(text):
    policy, job = yaml.safe_load_all(text)
    assert policy["kind"] == "NetworkPolicy"
    return job


def pods(job):
    return {name: spec["template"] for name, spec in job["spec"]["mpiReplicaSpecs"].items()}


def container(job, role):
    (only,) = pods(job)[role]["spec"]["containers"]
    return only


@JOBS
def test_the_operators_part_fits_its_description(generate, arguments):
    jsonschema.validate(mpi_job_of(generate(*arguments)), MPI_JOB)


@JOBS
@pytest.mark.skipif(CRD is None, reason="no HVDKIT_MPIJOB_CRD: mpi-operator's file is not here")
def test_the_whole_job_fits_the_operators_schema(generate, arguments):
    (version,) = (
        version
        for version in yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
        if version["name"] == "v2beta1"
    )
    job = mpi_job_of(generate(*arguments))
    jsonschema.validate(job, version["schema"]["openAPIV3Schema"])


@JOBS
@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_the_pods_fit_the_schema_of_kubernetes(generate, arguments, role):
    job = mpi_job_of(generate(*arguments))
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **pods(job)[role]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@JOBS
def test_only_the_jobs_pods_can_connect_to_its_pods(generate, arguments):
    policy, job = yaml.safe_load_all(generate(*arguments))
    kubernetes_validate.validate(policy, kubernetes_validate.latest_version(), strict=True)
    # mpi-operator gives each pod of a job this label.
    pods = {"podSelector": {"matchLabels": {"training.kubeflow.org/job-name": name_of(job)}}}
    assert policy["spec"] == {
        **pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [pods]}],
    }
    assert policy["metadata"].get("namespace") == job["metadata"].get("namespace")


def name_of(document):
    return document["metadata"]["name"]


def expanded(word, variables):
    """Return an argument as Kubernetes passes it on: `$$` is `$`, `$(NAME)` is a variable."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]),
        word,
    )


@given(words=st.lists(st.text("$()A b", max_size=8), min_size=1))
@example(words=["$(HVDKIT_JOB_KEY)", "$$(A)", "$HOME", "cost: 5$$"])
def test_arguments_reach_the_script_as_they_are(words):
    spec = generated_pod.pod({"args": words})
    args = spec["containers"][0]["args"]
    assert [expanded(word, {"A": "x", "HVDKIT_JOB_KEY": "key"}) for word in args] == words


def test_the_schema_of_kubernetes_finds_a_wrong_name(generate):
    pod = pods(mpi_job_of(generate(*SMALL)))["Worker"]
    pod["spec"]["containers"][0]["securityContexts"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="securityContexts"):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **pod},
            kubernetes_validate.latest_version(),
            strict=True,
        )


def test_one_rank_per_gpu(generate):
    job = mpi_job_of(generate(*SMALL, "--workers", "2", "--gpus-per-worker", "4"))
    assert job["spec"]["slotsPerWorker"] == 4
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    resources = container(job, "Worker")["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "4"
    assert resources["requests"] == resources["limits"]
    assert "nvidia.com/gpu" not in container(job, "Launcher")["resources"]["limits"]


def test_the_launcher_waits_for_workers_whose_ssh_server_answers(generate):
    job = mpi_job_of(generate(*SMALL))
    assert job["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"
    worker = container(job, "Worker")
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    assert worker["args"] == ["sshd"]
    assert worker["ports"][0]["containerPort"] == port
    run = container(job, "Launcher")["args"]
    assert run[run.index("--ssh-port") + 1] == str(port)


def test_no_container_has_root_privileges(generate):
    job = mpi_job_of(generate(*LARGE))
    for role, pod in pods(job).items():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] != 0
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert container(job, role)["securityContext"]["allowPrivilegeEscalation"] is False
        assert container(job, role)["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_shared_memory_and_checkpoints_are_volumes(generate):
    job = mpi_job_of(generate(*LARGE))
    volumes = {volume["name"]: volume for volume in pods(job)["Worker"]["spec"]["volumes"]}
    mounts = {m["mountPath"]: m["name"] for m in container(job, "Worker")["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    claim = volumes[mounts["/checkpoints"]]["persistentVolumeClaim"]
    assert claim == {"claimName": "my-claim"}
    assert set(volumes) == set(mounts.values())


def test_workers_use_the_requested_nodes(generate):
    nodes = ("--node-selector", "example.com/pool=h100", "--node-selector", "spot=")
    pod = pods(mpi_job_of(generate(*SMALL, *nodes, "--rdma", "rdma/hca_a=2")))
    assert pod["Worker"]["spec"]["nodeSelector"] == {"example.com/pool": "h100", "spot": ""}
    resources = pod["Worker"]["spec"]["containers"][0]["resources"]
    assert resources["requests"]["rdma/hca_a"] == resources["limits"]["rdma/hca_a"] == "2"
    # The launcher has no ranks, and does not use such nodes.
    assert "nodeSelector" not in pod["Launcher"]["spec"]
    assert "rdma/hca_a" not in pod["Launcher"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    ("given", "toleration"),
    [
        ("nvidia.com/gpu", {"operator": "Exists"}),
        ("nvidia.com/gpu:NoExecute", {"operator": "Exists", "effect": "NoExecute"}),
        ("nvidia.com/gpu=yes", {"operator": "Equal", "value": "yes"}),
        (
            "nvidia.com/gpu=yes:NoSchedule",
            {"operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        ),
        ("nvidia.com/gpu=", {"operator": "Equal", "value": ""}),
    ],
)
def test_workers_tolerate_taints(generate, given, toleration):
    job = mpi_job_of(generate(*SMALL, "--toleration", given, "--toleration", "other"))
    found = pods(job)["Worker"]["spec"]["tolerations"]
    assert found == [
        {"key": "nvidia.com/gpu"} | toleration,
        {"key": "other", "operator": "Exists"},
    ]
    assert "tolerations" not in pods(job)["Launcher"]["spec"]


def test_a_job_that_saved_and_stopped_is_restarted(generate):
    job = mpi_job_of(generate(*LARGE))
    assert job["spec"]["runPolicy"]["backoffLimit"] == 5
    assert job["spec"]["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "Never"
    grace = pods(job)["Launcher"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > Timeouts.stop


def test_hvdkit_run_accepts_the_command(generate, monkeypatch, capsys):
    command = ("python", "train.py", "--name", "a b", "$HOME")
    args = container(mpi_job_of(generate(*SMALL, "--restarts", "5", command=command)), "Launcher")[
        "args"
    ]
    assert args[-5:] == list(command)
    taken = []
    monkeypatch.setattr("hvdkit.launch.command.run", lambda options: taken.append(options) or 0)
    assert args[0] == "hvdkit"
    assert main(args[1:]) == 0
    (options,) = taken
    assert options.command == list(command)
    assert options.restarts == 5
    assert str(options.hostfile) == "/etc/mpi/hostfile"


def test_the_operators_hostfile_is_read(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("train-worker-0.train.ns.svc slots=8\ntrain-worker-1.train.ns.svc slots=8\n")
    assert read_hostfile(path) == [Host(f"train-worker-{n}.train.ns.svc", 8) for n in range(2)]


def test_comments_stand_above_their_keys(generate):
    lines = [line.strip() for line in generate(*LARGE).splitlines()]
    assert all(len(line) <= 100 for line in lines)
    above = lines.index("slotsPerWorker: 8") - 1
    assert lines[above] == "# Ranks on each worker: one per GPU."
    assert any("75" in line for line in lines if line.startswith("#"))


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("src/Fine_Tune.py", "fine-tune"), ("2024.py", "job")],
)
def test_the_job_has_the_name_of_its_script(generate, script, name):
    job = mpi_job_of(generate(*SMALL, command=("python", script)))
    assert job["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "--workers is 0"),
        (["--queue", "Gold"], "--queue is 'Gold'"),
        (["--rdma", "hca=1"], "--rdma is 'hca=1'. Expected RESOURCE=N"),
        (["--rdma", "rdma/hca"], "--rdma is 'rdma/hca'. Expected"),
        (["--rdma", "rdma/hca=0"], "N at least 1"),
        (["--node-selector", "zone"], "--node-selector is 'zone'. Expected KEY=VALUE"),
        (["--node-selector", "zone=a b"], "--node-selector is 'zone=a b'"),
        (
            ["--node-selector", "zone=a", "--node-selector", "zone=b"],
            "--node-selector gives zone twice: 'a' and 'b'",
        ),
        (["--toleration", "gpu:Never"], "with EFFECT one of NoSchedule"),
        (["--toleration", "=true"], "--toleration is '=true'"),
        (["--key-secret", "mine"], "choose --kind job or jobset"),
        (["--memory", "much"], "--memory is 'much'"),
        (["--memory", "0.0Gi"], "--memory is '0.0Gi'"),
        (["--image", ""], "--image is ''; expected e.g. registry/me/train:1"),
        (["--name", "Big_Job"], "--name is 'Big_Job'"),
        (["--name", "x" * 60], "expected at most 63"),
        (["--gpus-per-worker", "-1"], "--gpus-per-worker is -1"),
    ],
)
def test_options_that_kubernetes_would_refuse_are_refused(arguments, said, capsys):
    assert main(["generate", "kubernetes", *SMALL, *arguments, "python", "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_command(capsys):
    assert main(["generate", "kubernetes", *SMALL]) == 2
    assert "python train.py" in capsys.readouterr().err
