"""The kinds of jobs whose pods are nodes of `hvdkit run --nodes`: the indexed Job, and the JobSet.

kubernetes-validate has the schemas of Kubernetes. JobSet publishes its schema only in its
repository. To validate every JobSet against it too, name a copy of the file
config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml in HVDKIT_JOBSET_CRD.
"""

import os
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from hvdkit.cli import main
from hvdkit.errors import RESUMABLE
from hvdkit.launch.timeouts import Timeouts
from tests.launch.generate.test_kubernetes import COUNT, TEXT, closed

CRD = os.environ.get("HVDKIT_JOBSET_CRD")

SMALL = ["--image", "registry/train:1"]
LARGE = [
    *SMALL,
    *("--name", "large", "--namespace", "research", "--workers", "16", "--gpus-per-worker", "8"),
    *("--cpus", "64", "--memory", "512Gi", "--shared-memory", "64Gi", "--checkpoints", "my-claim"),
    *("--retries", "5", "--queue", "gold", "--rdma", "rdma/hca=1", "--key-secret", "mine"),
    *("--node-selector", "pool=h100", "--toleration", "nvidia.com/gpu:NoSchedule"),
]
SIZES = pytest.mark.parametrize("arguments", [SMALL, LARGE], ids=["small", "large"])
KINDS = pytest.mark.parametrize("kind", ["job", "jobset"])


FLAG = {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
RULE = closed(
    {
        "name": {"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "action": {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
        # The controller's reasons of a failed Job.
        "onJobFailureReasons": {
            "type": "array",
            "uniqueItems": True,
            "items": {
                "enum": [
                    "BackoffLimitExceeded",
                    "DeadlineExceeded",
                    "FailedIndexes",
                    "MaxFailedIndexesExceeded",
                    "PodFailurePolicy",
                ]
            },
        },
        "targetReplicatedJobs": TEXTS,
    },
    "name",
    "action",
)
#: jobset.x-k8s.io/v1alpha2 as of JobSet 0.6, by its documentation. The template is Kubernetes'.
JOB_SET = closed(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": closed({"name": TEXT, "namespace": TEXT, "labels": {"type": "object"}}, "name"),
        "spec": closed(
            {
                "suspend": FLAG,
                "network": closed(
                    {
                        "enableDNSHostnames": FLAG,
                        "subdomain": TEXT,
                        "publishNotReadyAddresses": FLAG,
                    }
                ),
                "failurePolicy": closed(
                    {"maxRestarts": COUNT, "rules": {"type": "array", "items": RULE}}
                ),
                "replicatedJobs": {
                    "type": "array",
                    "items": closed(
                        {
                            "name": TEXT,
                            "replicas": COUNT,
                            "template": closed({"metadata": {"type": "object"}, "spec": {}}),
                        },
                        "name",
                        "template",
                    ),
                },
            },
            "replicatedJobs",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)


class Generated:
    """The objects of a file, by the names that Kubernetes and JobSet use.

    Attributes:
        text: the file.
        documents: its objects, by their kind.
        top: the object that the user starts, watches and ends.
        job: the Job that Kubernetes runs, with the name that it has there.
        domain: the Service's name.
    """

    def __init__(self, text):
        self.text = text
        self.documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
        self.top = self.documents.get("JobSet") or self.documents["Job"]
        if "JobSet" in self.documents:
            (replicated,) = self.top["spec"]["replicatedJobs"]
            assert replicated["replicas"] == 1
            name = f"{self.top['metadata']['name']}-{replicated['name']}-0"
            self.job = {"metadata": {"name": name}, **replicated["template"]}
            self.domain = self.top["spec"]["network"]["subdomain"]
        else:
            self.job = self.top
            self.domain = self.documents["Service"]["metadata"]["name"]
        self.pod = self.job["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]


@pytest.fixture
def generate(capsys):
    def generated(kind, *arguments, command=("python", "train.py")):
        given = ["generate", "kubernetes", "--kind", kind, *arguments, *command]
        assert main(given) == 0, capsys.readouterr().err
        return Generated(capsys.readouterr().out)

    return generated


def validate(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@SIZES
def test_service_and_job_fit_the_schemas_of_kubernetes(generate, arguments):
    documents = generate("job", *arguments).documents
    assert list(documents) == ["Service", "NetworkPolicy", "Job"]
    for document in documents.values():
        validate(document)


@SIZES
def test_the_job_set_fits_its_description(generate, arguments):
    generated = generate("jobset", *arguments)
    assert list(generated.documents) == ["NetworkPolicy", "JobSet"]
    validate(generated.documents["NetworkPolicy"])
    jsonschema.validate(generated.top, JOB_SET)
    validate({"apiVersion": "batch/v1", "kind": "Job", **generated.job})


@SIZES
@pytest.mark.skipif(CRD is None, reason="no HVDKIT_JOBSET_CRD: JobSet's file is not here")
def test_the_whole_job_set_fits_its_own_schema(generate, arguments):
    (version,) = yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
    jsonschema.validate(generate("jobset", *arguments).top, version["schema"]["openAPIV3Schema"])


def test_the_description_of_job_set_finds_a_wrong_name(generate):
    job_set = generate("jobset", *SMALL).top
    job_set["spec"]["failurePolicy"]["maxRetries"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxRetries"):
        jsonschema.validate(job_set, JOB_SET)


@KINDS
@pytest.mark.parametrize("workers", [1, 3])
def test_all_pods_run_at_once_and_are_numbered(generate, kind, workers):
    spec = generate(kind, *SMALL, "--workers", str(workers)).job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert (spec["completions"], spec["parallelism"]) == (workers, workers)


@KINDS
def test_the_rendezvous_is_the_dns_name_of_pod_0(generate, kind):
    generated = generate(kind, *LARGE)
    args = generated.container["args"]
    name = f"{generated.job['metadata']['name']}-0.{generated.domain}"
    assert args[args.index("--rdzv") + 1].partition(":")[0] == name


def test_the_service_names_the_pods_of_the_job(generate):
    generated = generate("job", *LARGE)
    service, job = generated.documents["Service"], generated.documents["Job"]
    assert service["metadata"]["namespace"] == job["metadata"]["namespace"] == "research"
    assert generated.pod["subdomain"] == service["metadata"]["name"]
    # Kubernetes gives each pod of a Job this label.
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


@KINDS
def test_only_the_jobs_pods_can_connect_to_its_pods(generate, kind):
    generated = generate(kind, *LARGE)
    policy = generated.documents["NetworkPolicy"]
    # Kubernetes and JobSet give each pod such a label.
    label = {"job": "job-name", "jobset": "jobset.sigs.k8s.io/jobset-name"}[kind]
    pods = {"podSelector": {"matchLabels": {label: generated.top["metadata"]["name"]}}}
    assert policy["spec"] == {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    assert policy["metadata"]["namespace"] == "research"


def test_job_set_makes_the_service_itself(generate):
    generated = generate("jobset", *LARGE)
    assert generated.top["spec"]["network"]["enableDNSHostnames"] is True
    assert generated.top["spec"]["network"]["publishNotReadyAddresses"] is True
    # JobSet sets the pods' subdomain.
    assert "subdomain" not in generated.pod


@KINDS
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


@KINDS
@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ([], 2),
        (["--gpus-per-worker", "4"], 8),
        (["--gpus-per-worker", "4", "--ranks-per-worker", "3"], 6),
    ],
)
def test_np_is_the_number_of_ranks_of_all_pods(generate, kind, arguments, ranks):
    args = generate(kind, *SMALL, "--workers", "2", *arguments).container["args"]
    assert args[args.index("-np") + 1] == str(ranks)


@KINDS
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


@KINDS
def test_the_head_finds_the_logs_of_pod_0(generate, kind):
    generated = generate(kind, *LARGE)
    (watch,) = (line for line in generated.text.splitlines() if "kubectl -n research logs" in line)
    labels = watch.partition(" -l ")[2].split(",")
    name = generated.job["metadata"]["name"]
    assert labels == [f"job-name={name}", "batch.kubernetes.io/job-completion-index=0"]
    # With labels, kubectl shows the last ten lines only.
    assert "--tail=-1" in watch


@pytest.mark.parametrize(("retries", "limit"), [(0, 0), (5, 20)])
def test_retries_of_a_job_count_all_its_pods(generate, retries, limit):
    spec = generate("job", *SMALL, "--workers", "4", "--retries", str(retries)).job["spec"]
    assert spec["backoffLimit"] == limit


def test_a_job_set_restarts_all_pods_when_the_first_one_fails(generate):
    generated = generate("jobset", *SMALL, "--workers", "4", "--retries", "5")
    assert generated.job["spec"]["backoffLimit"] == 0
    assert generated.top["spec"]["failurePolicy"]["maxRestarts"] == 5


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
def test_a_pod_that_saved_or_was_evicted_is_not_a_failure(generate, kind, uncounted):
    generated = generate(kind, *SMALL)
    rules = generated.job["spec"]["podFailurePolicy"]["rules"]
    assert action(rules, status=RESUMABLE) == uncounted
    assert action(rules, status=143, condition="DisruptionTarget") == uncounted
    assert action(rules, status=1) is None
    # Kubernetes accepts such rules with this policy only.
    assert generated.pod["restartPolicy"] == "Never"
    assert generated.pod["terminationGracePeriodSeconds"] > Timeouts.stop


def test_a_job_set_does_not_count_the_restart_of_such_a_pod(generate):
    (rule,) = generate("jobset", *SMALL).top["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    # The reason of a Job that a rule of its podFailurePolicy has ended.
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@KINDS
def test_a_pod_has_what_a_worker_of_an_mpijob_has(generate, capsys, kind):
    generated = generate(kind, *LARGE)
    arguments = [given for given in LARGE if given not in ("--key-secret", "mine")]
    assert main(["generate", "kubernetes", *arguments, "python", "train.py"]) == 0
    _, mpi_job = yaml.safe_load_all(capsys.readouterr().out)
    worker = mpi_job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    for field in (
        "automountServiceAccountToken",
        "securityContext",
        "volumes",
        "nodeSelector",
        "tolerations",
    ):
        assert generated.pod[field] == worker[field]
    for field in ("securityContext", "resources", "volumeMounts"):
        assert generated.container[field] == worker["containers"][0][field]


@pytest.mark.parametrize("kind", ["mpijob", "job", "jobset"])
def test_a_job_with_a_queue_waits_for_kueue(capsys, kind):
    given = ["generate", "kubernetes", "--kind", kind, *SMALL]
    assert main([*given, "--queue", "gold", "python", "train.py"]) == 0
    top = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    assert top["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gold"}
    where = top["spec"]["runPolicy"] if kind == "mpijob" else top["spec"]
    assert where["suspend"] is True

    assert main([*given, "python", "train.py"]) == 0
    assert "suspend" not in capsys.readouterr().out


@KINDS
def test_comments_stand_above_their_keys(generate, kind):
    lines = [line.strip() for line in generate(kind, *LARGE).text.splitlines()]
    assert all(len(line) <= 100 for line in lines if "kubectl" not in line)
    above = lines[: lines.index("completionMode: Indexed")][-1]
    assert above == "# Each pod gets a number, JOB_COMPLETION_INDEX: its node rank."
    assert lines[lines.index("suspend: true") - 1].startswith("# Kueue")


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


@KINDS
def test_a_secret_that_kubernetes_would_refuse_is_refused(capsys, kind):
    arguments = ["--kind", kind, *SMALL, "--key-secret", "My_Key"]
    assert main(["generate", "kubernetes", *arguments, "python", "train.py"]) == 2
    assert "--key-secret is 'My_Key'; expected lowercase letters" in capsys.readouterr().err
