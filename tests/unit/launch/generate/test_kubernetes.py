"""The generated jobs fit the schemas of Kubernetes, and descriptions of MPIJob and JobSet.

kubernetes-validate has the schemas of Kubernetes. mpi-operator and JobSet publish their schemas in
their repositories only. To validate every job against them too, name copies of their files
kubeflow.org_mpijobs.yaml in HVDKIT_MPIJOB_CRD, and jobset.x-k8s.io_jobsets.yaml in
HVDKIT_JOBSET_CRD.
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
from hvdkit.errors import RESUMABLE
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.generate import kubernetes
from hvdkit.launch.hosts.hosts import Host, read_hostfile

SMALL = ["--image", "registry/train:1"]
LARGE = [
    *SMALL,
    *("--name", "large", "--namespace", "research", "--workers", "16", "--gpus-per-worker", "8"),
    *("--cpus", "64", "--memory", "512Gi", "--shared-memory", "64Gi", "--checkpoints", "my-claim"),
    *("--retries", "5", "--queue", "gold", "--rdma", "rdma/hca=1"),
    *("--node-selector", "pool=h100", "--toleration", "nvidia.com/gpu:NoSchedule"),
]
KINDS = pytest.mark.parametrize("kind", ["mpijob", "job", "jobset"])
#: The kinds whose pods are nodes of `hvdkit run --nodes`.
NODES = pytest.mark.parametrize("kind", ["job", "jobset"])


class OneOf(tuple):
    """The permitted values of a field."""


REPLICAS = {"replicas": int, "restartPolicy": OneOf(("Never", "OnFailure")), "template": dict}
#: The operator's part of kubeflow.org/v2beta1's MPIJob, from its documentation.
MPI_JOB = {
    "slotsPerWorker": int,
    "runLauncherAsWorker": bool,
    "sshAuthMountPath": str,
    "launcherCreationPolicy": OneOf(("AtStartup", "WaitForWorkersReady")),
    "mpiImplementation": OneOf(("OpenMPI", "Intel", "MPICH")),
    "mpiReplicaSpecs": {"Launcher": REPLICAS, "Worker": REPLICAS},
    "runPolicy": {
        "cleanPodPolicy": OneOf(("All", "Running", "None")),
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "suspend": bool,
    },
}
RULE = {
    "name": str,
    "action": OneOf(("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")),
    # The controller's reasons of a failed Job.
    "onJobFailureReasons": [
        OneOf(("BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"))
    ],
}
#: jobset.x-k8s.io/v1alpha2 as of JobSet 0.6, by its documentation. The template is Kubernetes'.
JOB_SET = {
    "suspend": bool,
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "failurePolicy": {"maxRestarts": int, "rules": [RULE]},
    "replicatedJobs": [{"name": str, "replicas": int, "template": dict}],
}
#: The description of the field `spec`, the version, and the variable with the published schema.
DESCRIPTIONS = {
    "mpijob": (MPI_JOB, "kubeflow.org/v2beta1", "HVDKIT_MPIJOB_CRD"),
    "jobset": (JOB_SET, "jobset.x-k8s.io/v1alpha2", "HVDKIT_JOBSET_CRD"),
}


def check(value, description):
    """Check that an object has only known fields, with values of the right types."""
    match description:
        case OneOf():
            assert value in description
        case type():
            assert type(value) is description
        case [each]:
            for item in value:
                check(item, each)
        case _:
            assert value.keys() <= description.keys()
            for name in value:
                check(value[name], description[name])


# The labels of the pods of a job.
LABELS = {
    "mpijob": "training.kubeflow.org/job-name",
    "job": "job-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
}


class Generated:
    """The objects of a file, by the names that Kubernetes, mpi-operator and JobSet use.

    Attributes:
        text: the file.
        documents: its objects, by their kind.
        top: the object that the user starts, watches and ends.
        name: its name.
        job: the Job that Kubernetes runs, with the name that it has there; not of an MPIJob.
        domain: the Service's name.
        pod: the pod of a worker.
        container: its container.
        launcher: the pod of the launcher of an MPIJob.
    """

    def __init__(self, text):
        self.text = text
        self.documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
        self.top = list(self.documents.values())[-1]
        self.name, spec = self.top["metadata"]["name"], self.top["spec"]
        if "MPIJob" in self.documents:
            replicas = spec["mpiReplicaSpecs"]
            self.launcher, self.pod = (
                replicas[role]["template"]["spec"] for role in ("Launcher", "Worker")
            )
        elif "JobSet" in self.documents:
            (replicated,) = spec["replicatedJobs"]
            assert replicated["replicas"] == 1
            name = f"{self.name}-{replicated['name']}-0"
            self.job = {"metadata": {"name": name}, **replicated["template"]}
            self.domain = spec["network"]["subdomain"]
        else:
            self.job = self.top
            self.domain = self.documents["Service"]["metadata"]["name"]
        if "MPIJob" not in self.documents:
            self.pod = self.job["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]


@pytest.fixture
def generate(capsys):
    def generated(kind, *arguments, command=("python", "train.py")):
        words = ["generate", "kubernetes", "--kind", kind, *map(str, arguments), *command]
        assert main(words) == 0, capsys.readouterr().err
        return Generated(capsys.readouterr().out)

    return generated


def validate(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@KINDS
@pytest.mark.parametrize("arguments", [SMALL, LARGE], ids=["small", "large"])
def test_a_file_fits_the_schemas(generate, kind, arguments):
    generated = generate(kind, *arguments)
    names = ["NetworkPolicy", {"mpijob": "MPIJob", "job": "Job", "jobset": "JobSet"}[kind]]
    assert list(generated.documents) == (["Service", *names] if kind == "job" else names)
    for name, document in generated.documents.items():
        if name not in ("MPIJob", "JobSet"):
            validate(document)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    if kind == "mpijob":
        validate({**pod, "spec": generated.pod})
        validate({**pod, "spec": generated.launcher})
    else:
        validate({"apiVersion": "batch/v1", "kind": "Job", **generated.job})
    if kind in DESCRIPTIONS:
        description, version, variable = DESCRIPTIONS[kind]
        check(generated.top["spec"], description)
        assert generated.top["apiVersion"] == version
        if variable in os.environ:
            versions = yaml.safe_load(Path(os.environ[variable]).read_text())["spec"]["versions"]
            (crd,) = (each for each in versions if version.endswith(f"/{each['name']}"))
            jsonschema.validate(generated.top, crd["schema"]["openAPIV3Schema"])


def test_the_schemas_find_a_wrong_name(generate):
    job_set = generate("jobset", *SMALL).top
    job_set["spec"]["failurePolicy"]["maxRetries"] = 3
    with pytest.raises(AssertionError, match="maxRetries"):
        check(job_set["spec"], JOB_SET)
    pod = generate("mpijob", *SMALL).pod
    pod["containers"][0]["securityContexts"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="securityContexts"):
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod})


# All kinds


@KINDS
def test_only_the_jobs_pods_can_connect_to_its_pods(generate, kind):
    generated = generate(kind, *LARGE)
    policy = generated.documents["NetworkPolicy"]
    pods = {"podSelector": {"matchLabels": {LABELS[kind]: generated.name}}}
    assert policy["spec"] == {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    assert policy["metadata"]["namespace"] == generated.top["metadata"]["namespace"] == "research"


@KINDS
def test_the_pod_of_a_worker(generate, kind):
    generated = generate(kind, *LARGE)
    pod, container = generated.pod, generated.container
    for each in [pod, generated.launcher] if kind == "mpijob" else [pod]:
        assert each["securityContext"]["runAsNonRoot"] is True
        assert each["securityContext"]["runAsUser"] != 0
        assert each["automountServiceAccountToken"] is False
        (only,) = each["containers"]
        assert only["securityContext"]["allowPrivilegeEscalation"] is False
        assert only["securityContext"]["capabilities"]["drop"] == ["ALL"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    claim = volumes[mounts["/checkpoints"]]["persistentVolumeClaim"]
    assert claim == {"claimName": "my-claim"}
    assert set(volumes) == set(mounts.values())
    limits = container["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["cpu"], limits["memory"]) == ("8", "64", "512Gi")
    assert limits["rdma/hca"] == "1"
    assert container["resources"]["requests"] == limits


@KINDS
@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        (["--node-selector", "example.com/pool=h100", "--node-selector", "spot="], "nodeSelector",
         {"example.com/pool": "h100", "spot": ""}),
        (["--toleration", "nvidia.com/gpu", "--toleration", "other"], "tolerations",
         [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "other", "operator": "Exists"}]),
        (["--toleration", "gpu=yes:NoSchedule"], "tolerations",
         [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}]),
        (["--toleration", "gpu="], "tolerations",
         [{"key": "gpu", "operator": "Equal", "value": ""}]),
    ],
)  # fmt: skip
def test_workers_use_the_requested_nodes(generate, kind, options, field, expected):
    generated = generate(kind, *SMALL, *options)
    assert generated.pod[field] == expected
    # The launcher has no ranks, and does not use such nodes.
    assert kind != "mpijob" or field not in generated.launcher


@KINDS
def test_a_job_with_a_queue_waits_for_kueue(generate, kind):
    top = generate(kind, *SMALL, "--queue", "gold").top
    assert top["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gold"}
    where = top["spec"]["runPolicy"] if kind == "mpijob" else top["spec"]
    assert where["suspend"] is True
    assert "suspend" not in generate(kind, *SMALL).text


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("src/Fine_Tune.py", "fine-tune"), ("2024.py", "job")],
)
def test_the_job_has_the_name_of_its_script(generate, script, name):
    assert generate("mpijob", *SMALL, command=("python", script)).name == name


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
    args = kubernetes.arguments(words)
    assert [expanded(word, {"A": "x", "HVDKIT_JOB_KEY": "key"}) for word in args] == words


# The MPIJob


def test_an_mpi_job(generate, monkeypatch):
    command = ("python", "train.py", "--name", "a b", "$HOME")
    sizes = ("--workers", 2, "--gpus-per-worker", 4, "--rdma", "rdma/hca_a=2")
    words = (*SMALL, *sizes, "--retries", 5, "--restarts", 5)
    generated = generate("mpijob", *words, command=command)
    spec, worker = generated.top["spec"], generated.container
    (launcher,) = generated.launcher["containers"]
    # One rank per GPU. The launcher has none.
    assert spec["slotsPerWorker"] == 4
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert not {"nvidia.com/gpu", "rdma/hca_a"} & launcher["resources"]["limits"].keys()
    # The launcher waits for workers whose ssh server answers.
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    assert worker["args"] == ["sshd"]
    assert worker["ports"][0]["containerPort"] == port
    run = launcher["args"]
    assert run[run.index("--ssh-port") + 1] == str(port)
    # A job that has saved and stopped is restarted.
    assert spec["runPolicy"]["backoffLimit"] == 5
    assert spec["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "Never"
    assert generated.launcher["terminationGracePeriodSeconds"] > Timeouts.stop
    # `hvdkit run` accepts the command.
    taken = []
    monkeypatch.setattr(
        "hvdkit.launch.options.command.run", lambda options: taken.append(options) or 0
    )
    assert run[0] == "hvdkit"
    assert main(run[1:]) == 0
    (options,) = taken
    assert (options.command, options.restarts) == (list(command), 5)
    assert str(options.hostfile) == "/etc/mpi/hostfile"


def test_the_operators_hostfile_is_read(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("train-worker-0.train.ns.svc slots=8\ntrain-worker-1.train.ns.svc slots=8\n")
    assert read_hostfile(path) == [Host(f"train-worker-{n}.train.ns.svc", 8) for n in range(2)]


# The indexed Job, and the JobSet


@NODES
def test_the_names_of_pod_0(generate, kind):
    generated = generate(kind, *LARGE)
    args, name = generated.container["args"], generated.job["metadata"]["name"]
    host = args[args.index("--rdzv") + 1].partition(":")[0]
    assert host == f"{name}-0.{generated.domain}"
    # The head finds the logs of the pod.
    (watch,) = (line for line in generated.text.splitlines() if "kubectl -n research logs" in line)
    labels = watch.partition(" -l ")[2].split(",")
    assert labels == [f"job-name={name}", "batch.kubernetes.io/job-completion-index=0"]
    # With labels, kubectl shows the last ten lines only.
    assert "--tail=-1" in watch
    if kind == "jobset":
        network = generated.top["spec"]["network"]
        assert network["enableDNSHostnames"] is network["publishNotReadyAddresses"] is True
        # JobSet sets the pods' subdomain.
        assert "subdomain" not in generated.pod
        return
    service = generated.documents["Service"]
    assert service["metadata"]["namespace"] == "research"
    assert generated.pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {LABELS["job"]: name}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


@NODES
@pytest.mark.parametrize("number", [0, 1])
def test_each_pod_can_run_its_command(generate, monkeypatch, capsys, kind, number):
    command = ("echo", "--name", "a b", "$HOME")
    sizes = ("--name", "t", "--workers", "2", "--ranks-per-worker", "3", "--restarts", "5")
    container = generate(kind, *SMALL, *sizes, command=command).container
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], "0123456789abcdef")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(number))
    program, verb, *arguments = container["args"]
    assert program == "hvdkit"
    assert arguments[-6:-4] == ["--restarts", "5"]
    assert main([verb, "--dry-run", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"node {number} of 2: {['listens', 'joins node 0'][number]} at")
    assert "runs 3 ranks" in out
    assert out.endswith("echo --name 'a b' '$HOME'\n")


@NODES
@pytest.mark.parametrize(
    ("arguments", "pods", "ranks"),
    [
        ([], 1, 1),
        (["--workers", 2, "--gpus-per-worker", 4], 2, 8),
        (["--workers", 2, "--gpus-per-worker", 4, "--ranks-per-worker", 3], 2, 6),
    ],
)
def test_all_pods_run_at_once_and_their_ranks_are_counted(generate, kind, arguments, pods, ranks):
    generated = generate(kind, *SMALL, *arguments)
    spec, args = generated.job["spec"], generated.container["args"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == pods
    assert args[args.index("-np") + 1] == str(ranks)


@NODES
@pytest.mark.parametrize(("arguments", "secret"), [([], "t-key"), (["--key-secret", "k"], "k")])
def test_the_key_comes_from_the_secret_that_the_head_creates(generate, kind, arguments, secret):
    generated = generate(kind, *SMALL, "--name", "t", *arguments)
    (variable,) = generated.container["env"]
    source = {"secretKeyRef": {"name": secret, "key": "key"}}
    assert variable == {"name": "HVDKIT_JOB_KEY", "valueFrom": source}
    # Not in an argument, which other users of this machine can read.
    create = f"kubectl create secret generic {secret} --from-file=key=/dev/stdin"
    assert f"openssl rand -hex 16 | {create}" in generated.text
    assert f"kubectl delete secret {secret}" in generated.text


def action(rules, status=1, condition=None):
    """Return the action of the first rule that matches a failed pod, as Kubernetes chooses it."""
    for rule in rules:
        exits, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        if exits is not None and (status in exits["values"]) == (exits["operator"] == "In"):
            return rule["action"]
        if condition in [each["type"] for each in conditions]:
            return rule["action"]
    return None


@pytest.mark.parametrize(("kind", "uncounted"), [("job", "Ignore"), ("jobset", "FailJob")])
def test_which_ends_of_pods_are_failures(generate, kind, uncounted):
    generated = generate(kind, *SMALL, "--workers", 4, "--retries", 5)
    rules = generated.job["spec"]["podFailurePolicy"]["rules"]
    assert action(rules, status=RESUMABLE) == uncounted
    assert action(rules, status=143, condition="DisruptionTarget") == uncounted
    assert action(rules, status=1) is None
    # Kubernetes accepts such rules with this policy only.
    assert generated.pod["restartPolicy"] == "Never"
    assert generated.pod["terminationGracePeriodSeconds"] > Timeouts.stop
    # The retries of a Job count all its pods. A JobSet restarts all pods when the first one fails.
    assert generated.job["spec"]["backoffLimit"] == (20 if kind == "job" else 0)
    if kind == "job":
        assert generate(kind, *SMALL, "--retries", 0).job["spec"]["backoffLimit"] == 0
        return
    policy = generated.top["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    # The reason of a Job that a rule of its podFailurePolicy has ended.
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize(
    ("kind", "longest"),
    # The names of pod 9: NAME-9 is a host's, NAME-worker-0-9-abcde is what JobSet checks.
    [("job", 63 - len("-9")), ("jobset", 63 - len("-worker-0-9-abcde"))],
)
def test_the_length_of_pod_names_is_limited(generate, capsys, kind, longest):
    generate(kind, *SMALL, "--workers", "10", "--name", "x" * longest)
    arguments = ["--kind", kind, *SMALL, "--workers", "10", "--name", "x" * (longest + 1)]
    assert main(["generate", "kubernetes", *arguments, "python", "train.py"]) == 2
    assert "64 characters; expected at most 63. Give a shorter --name" in capsys.readouterr().err


# Wrong options


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
        (["--node-selector", "zone=a", "--node-selector", "zone=b"], "gives zone twice: 'a' and"),
        (["--toleration", "gpu:Never"], "with EFFECT one of NoSchedule"),
        (["--toleration", "=true"], "--toleration is '=true'"),
        (["--key-secret", "mine"], "choose --kind job or jobset"),
        (["--kind", "job", "--key-secret", "My_Key"], "--key-secret is 'My_Key'; expected lowerc"),
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
    assert main(["generate", "kubernetes", *SMALL]) == 2
    assert "python train.py" in capsys.readouterr().err
