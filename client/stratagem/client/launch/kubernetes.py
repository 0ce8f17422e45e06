"""Make the manifest of a Kubernetes Indexed Job whose pods run the workers of one run, and are
replaced when preempted.

All functions but `submit` are pure.
"""

import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import yaml

from stratagem.client.launch.workers import SiteProgram, WorkerLaunch
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import check_worker_id
from stratagem.common.process.process_exit import PREEMPTED

# ---- Pods ----
#
# Each pod that `stratagem launch kubernetes` asks for has a container that is a worker of the
# run.
#
# The pods are those of `deploy/kubernetes`, except for the features of a StatefulSet: a launched
# worker does not get its name back. They have a label of their own, so neither the Service nor the
# disruption budget of the standing workers selects them; a budget would refuse all evictions of
# pods of a Job.

PORT: Final = 7072
"""The port of a pod's first worker; network policies open it to the coordinator."""
HEALTH_PORT: Final = 7172
METRICS_PORT: Final = 9100
"""The metrics port of a pod's first worker; the component `metrics` opens it to Prometheus."""
MAX_PER_POD: Final = 16
START_APART_S: Final = 60
"""The initial delay of the liveness probe, as a pod's workers do not start together."""
GRACE_S: Final = 60
DRAIN_GRACE_S: Final = 45
MAX_NAME: Final = 50
"""The longest name of a Job: pods append an index and five letters, to 63 characters at most."""
USER: Final = 10001
CODE: Final = "/srv/code"
DATA: Final = "/var/lib/stratagem"
CERTIFICATES: Final = "/etc/stratagem/tls"

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodShape:
    """The shape of the pods of a launch: workers, GPUs, queue, secret and labels."""

    namespace: str
    image: str
    per_pod: int
    """The number of workers (containers) per pod; workers of one pod share memory."""
    cpus: int
    memory: str
    gpus: int
    """The number of GPUs per worker."""
    queue: str | None
    """The name of the Kueue queue that admits the job."""
    secret: str | None
    """The name of the secret that holds ca.crt, pool-POOL.crt and pool-POOL.key."""
    pool: str | None
    metrics: bool
    """Let each worker serve metrics for Prometheus."""
    node_labels: tuple[str, ...] = ()
    """The labels that nodes must have, as KEY=VALUE."""
    job_name: str | None = None
    """The name of the Job, by default the run's; workers on a second kind of node need another."""


def template(launch: WorkerLaunch, shape: PodShape) -> Object:
    """Return the pod template of the Job, with its metadata."""
    return {"metadata": _about(launch, shape), "spec": _pod(launch, shape)}


def labels_of(launch: WorkerLaunch) -> Object:
    """Return the labels of the pods and Jobs of a launch's run."""
    return {
        "app.kubernetes.io/name": "stratagem",
        "app.kubernetes.io/component": "launched-worker",
        "app.kubernetes.io/instance": name_of(launch.run_id),
    }


def name_of(run_id: str) -> str:
    """Return a valid Job name for a run id, which may be longer, or begin or end with other
    characters."""
    name = re.sub(r"^[^a-z0-9]+|[^a-z0-9]+$", "", run_id)
    if name == run_id and len(name) <= MAX_NAME:
        return name
    digest = blake2b(run_id.encode(), digest_size=4).hexdigest()
    return f"{name[: MAX_NAME - 9]}-{digest}".lstrip("-")


def _about(launch: WorkerLaunch, shape: PodShape) -> Object:
    """Return the metadata of a pod, with Prometheus' annotations if it has one worker.

    The annotations have room for one port, so of several workers all but one would be missed.
    """
    about: Object = {"labels": labels_of(launch)}
    if shape.metrics and shape.per_pod == 1:
        about["annotations"] = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(METRICS_PORT),
            "prometheus.io/path": "/metrics",
        }
        if shape.secret is not None:
            about["annotations"]["prometheus.io/scheme"] = "https"
    return about


def _pod(launch: WorkerLaunch, shape: PodShape) -> Object:
    volumes: list[Object] = [{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    # The workers of a pod exchange tensors there; this memory counts as theirs.
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if shape.secret is not None:
        secret = {"secretName": shape.secret, "defaultMode": 0o440}
        volumes.append({"name": "tls", "secret": secret})
    pod: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(launch, shape, number) for number in range(shape.per_pod)],
        "volumes": volumes,
    }
    if shape.node_labels:
        pod["nodeSelector"] = dict(label.split("=") for label in shape.node_labels)
    if shape.gpus:
        toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        pod["tolerations"] = [toleration]
    return pod


def _container(launch: WorkerLaunch, shape: PodShape, number: int) -> Object:
    words = [*launch.command_of("kubernetes"), *_options(shape, number)]
    ports = {"grpc": PORT, "health": HEALTH_PORT}
    if shape.metrics:
        ports["metrics"] = METRICS_PORT
    limits: Object = {"memory": shape.memory}
    if shape.gpus:
        limits["nvidia.com/gpu"] = shape.gpus
    mounts: list[Object] = [
        {"name": "data", "mountPath": DATA, "subPath": f"worker-{number}"},
        {"name": "tmp", "mountPath": "/tmp", "subPath": f"worker-{number}"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if shape.secret is not None:
        mounts.append({"name": "tls", "mountPath": CERTIFICATES, "readOnly": True})
    probe = {"grpc": {"port": HEALTH_PORT + number}}
    alive = probe if shape.per_pod == 1 else _all_alive(shape.per_pod)
    return {
        "name": f"worker-{number}",
        "image": shape.image,
        "command": words[:3],
        "args": words[3:],
        "env": _environment(f"worker-{number}", shape),
        "ports": [
            {"name": f"{name}-{number}", "containerPort": first + number}
            for name, first in ports.items()
        ],
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": 150},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": {
            "requests": {"cpu": str(shape.cpus), "memory": shape.memory},
            "limits": limits,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _options(shape: PodShape, number: int) -> list[str]:
    """Return the command-line options of worker `number` of a pod that depend on the pod."""
    words = [
        f"--name=$(POD_NAME)-{number}" if number else "--name=$(POD_NAME)",
        f"--listen=$(POD_IP):{PORT + number}",
        f"--health-port={HEALTH_PORT + number}",
        f"--data-dir={DATA}",
        f"--drain-grace-s={DRAIN_GRACE_S}",
        "--log-json",
    ]
    if shape.metrics:
        words.append(f"--metrics-port={METRICS_PORT + number}")
    if shape.secret is not None:
        words += [
            f"--tls-ca={CERTIFICATES}/ca.crt",
            f"--tls-cert={CERTIFICATES}/pool-{shape.pool}.crt",
            f"--tls-key={CERTIFICATES}/pool-{shape.pool}.key",
            f"--pool={shape.pool}",
        ]
    return words


def _all_alive(num_workers: int) -> Object:
    """Return a liveness probe that fails in each container if any worker of the pod is dead.

    A pod is replaced only when all of its containers have ended. Without the probe, the place of a
    dead worker would stay empty while the others live. The delay allows for workers that start
    later.
    """
    addresses = [f"$POD_IP:{HEALTH_PORT + number}" for number in range(num_workers)]
    command = ["python", "-m", "stratagem.common.health", *addresses]
    return {"exec": {"command": command}, "initialDelaySeconds": START_APART_S}


def _environment(container: str, shape: PodShape) -> list[Object]:
    """Return the environment variables of a container: its pod's name and address, and the number
    of threads, taken from its CPU request, because nodes have different numbers of cores and the
    number of threads is part of the numerics."""
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    if shape.metrics:  # as for the standing workers, whose deployment is their namespace
        fields["STRATAGEM_WORKER_METRICS_DEPLOYMENT"] = "metadata.namespace"
    variables: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    cpus = {"containerName": container, "resource": "requests.cpu", "divisor": "1"}
    for name in ("STRATAGEM_WORKER_THREADS", "STRATAGEM_WORKER_MAX_READERS"):
        variables.append({"name": name, "valueFrom": {"resourceFieldRef": cpus}})
    return variables


# ---- Job ----

TRIES: Final = 3
"""The number of restarts of a failing worker."""
KEPT_S: Final = 86_400
QUEUE: Final = "kueue.x-k8s.io"

KUBECTL: Final = SiteProgram("kubectl", "run this on a machine that manages your cluster")
_LABEL: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_NODE_LABEL: Final = re.compile(rf"(?:[a-z0-9][-a-z0-9.]{{0,252}}/)?{_LABEL}=(?:{_LABEL})?")
_JOB_NAME: Final = re.compile(rf"[a-z0-9](?:[-a-z0-9]{{0,{MAX_NAME - 2}}}[a-z0-9])?")
_SPACE: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
"""The pattern of a valid namespace, which is a DNS label."""
_QUEUE: Final = re.compile(rf"(?=.{{1,63}}$){_SPACE.pattern}(?:\.{_SPACE.pattern})*")
"""The pattern of a valid queue name, which is also a label value."""
_PART: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SECRET: Final = re.compile(rf"(?=.{{1,253}}$){_PART}(?:\.{_PART})*")
"""The pattern of a valid secret name: a DNS name whose parts may be long."""
_MEMORY: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[kMGTPE]|[KMGTPE]i)?")

DISRUPTED: Final = {"type": "DisruptionTarget", "status": "True"}

HEAD: Final = """\
# Workers of run {run_id}, whose coordinator is {coordinator}.
# A pod that ends with {preempted} was preempted: it comes back, and counts as no failure.
"""


def kubernetes_job(launch: WorkerLaunch, shape: PodShape) -> Object:
    """Return the Job's manifest. Raises InvalidInputError for a number of workers that does not
    fill the last pod, for names and labels that Kubernetes would refuse, and for connections
    without certificates unless these were allowed."""
    _check(launch, shape)
    num_pods = launch.num_workers // shape.per_pod
    name = shape.job_name or name_of(launch.run_id)
    metadata: Object = {"name": name, "namespace": shape.namespace}
    metadata["labels"] = labels_of(launch)
    spec: Object = {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimitPerIndex": TRIES,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [DISRUPTED]},
                # A worker that has failed counts, though others of its pod leave because of it.
                {"action": "Count", "onExitCodes": {"operator": "NotIn", "values": [PREEMPTED]}},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
            ]
        },
        "ttlSecondsAfterFinished": KEPT_S,
        "template": template(launch, shape),
    }
    if shape.queue is not None:
        metadata["labels"] = metadata["labels"] | {f"{QUEUE}/queue-name": shape.queue}
        if num_pods > 1:  # Kueue refuses a minimum that is no smaller than the whole
            metadata["annotations"] = {
                f"{QUEUE}/job-min-parallelism": "1",
                f"{QUEUE}/job-completions-equal-parallelism": "true",
            }
        spec = {"suspend": True, **spec}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


class _Plain(yaml.SafeDumper):
    """A YAML dumper that repeats equal parts instead of writing references to the first one."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_text(job: Object, launch: WorkerLaunch) -> str:
    """Return the manifest as YAML text for kubectl, with a comment on the launch."""
    head = HEAD.format(run_id=launch.run_id, coordinator=launch.coordinator, preempted=PREEMPTED)
    return head + yaml.dump(job, Dumper=_Plain, sort_keys=False, width=1000)


def submit(path: Path) -> str:
    """Create the Job with kubectl, and return kubectl's answer. Raises UnavailableError."""
    return KUBECTL.answer("create", "-f", str(path))


def _check(launch: WorkerLaunch, shape: PodShape) -> None:
    _check_names(shape)
    if _MEMORY.fullmatch(shape.memory) is None:
        problem = f"{shape.memory!r} is no quantity of bytes, such as 24Gi"
        raise InvalidInputError.at("--memory", problem)
    for label in shape.node_labels:
        if _NODE_LABEL.fullmatch(label) is None:
            raise InvalidInputError.at("--node-label", f"{label!r} is not a label as KEY=VALUE")
    if not 1 <= shape.per_pod <= MAX_PER_POD:
        raise InvalidInputError.at("--per-pod", f"{shape.per_pod} is not 1 to {MAX_PER_POD}")
    if launch.num_workers % shape.per_pod:
        problem = f"{launch.num_workers} workers do not fill pods of {shape.per_pod}"
        raise InvalidInputError.at("--per-pod", problem)
    if (shape.secret is None) != (shape.pool is None):
        raise InvalidInputError.at("--tls-secret", "goes with --pool, whose certificate it holds")
    if shape.secret is None and "--allow-insecure-network" not in launch.command:
        problem = (
            "without a certificate nothing is encrypted: name its --pool, or, for a network "
            "that you trust, --worker --allow-insecure-network"
        )
        raise InvalidInputError.at("--tls-secret", problem)
    given = {word.partition("=")[0] for word in launch.command}
    for option in _options(shape, 0):
        name = option.partition("=")[0]
        if name in given:
            raise InvalidInputError.at("--worker", f"{name} is set by the launch; leave it out")


def _check_names(shape: PodShape) -> None:
    """Raise InvalidInputError for names that Kubernetes would refuse, but only after submission."""
    in_words = "of a-z, 0-9, and - between them"
    names = (
        ("--namespace", shape.namespace, _SPACE, f"1 to 63 {in_words}"),
        ("--job-name", shape.job_name, _JOB_NAME, f"1 to {MAX_NAME} {in_words}"),
        ("--queue", shape.queue, _QUEUE, f"1 to 63 {in_words}, in parts with dots"),
        ("--tls-secret", shape.secret, _SECRET, f"1 to 253 {in_words}, in parts with dots"),
        ("--image", shape.image, re.compile(r"[^\s]+"), "an image, as HOST/NAME:TAG"),
    )
    for field, name, pattern, allowed in names:
        if name is not None and pattern.fullmatch(name) is None:
            raise InvalidInputError.at(field, f"{name!r} is not {allowed}")
    if shape.pool is not None:
        try:
            check_worker_id(f"name.{shape.pool}")
        except InvalidInputError:
            text = f"{shape.pool!r} is not a pool, of A-Z, a-z, 0-9, '.', '_', '-'"
            raise InvalidInputError.at("--pool", text) from None
