"""An Indexed Job of Kubernetes: workers of one run, whose pods come back when they are preempted.

Pure, but for `submit`.
"""

import re
from pathlib import Path
from typing import Any, Final

import yaml

from stratagem.client.launch.kubernetes_pod import (
    MAX_NAME,
    MAX_PER_POD,
    Object,
    PodShape,
    labels_of,
    name_of,
    said_of,
    template,
)
from stratagem.client.launch.site_program import answer_of, check_program
from stratagem.client.launch.worker_launch import WorkerLaunch
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import check_worker_id
from stratagem.common.process.process import PREEMPTED

TRIES: Final = 3
"""A worker that ends by itself with an error is started again so often."""
KEPT_S: Final = 86_400
QUEUE: Final = "kueue.x-k8s.io"

_WHERE: Final = "where your cluster's is"
_LABEL: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_NODE_LABEL: Final = re.compile(rf"(?:[a-z0-9][-a-z0-9.]{{0,252}}/)?{_LABEL}=(?:{_LABEL})?")
_JOB_NAME: Final = re.compile(rf"[a-z0-9](?:[-a-z0-9]{{0,{MAX_NAME - 2}}}[a-z0-9])?")
_SPACE: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
"""A label of DNS: namespaces."""
_QUEUE: Final = re.compile(rf"(?=.{{1,63}}$){_SPACE.pattern}(?:\.{_SPACE.pattern})*")
"""Stands in a label, too."""
_PART: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SECRET: Final = re.compile(rf"(?=.{{1,253}}$){_PART}(?:\.{_PART})*")
"""Kubernetes limits the length of the whole, and not of parts."""
_MEMORY: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[kMGTPE]|[KMGTPE]i)?")

DISRUPTED: Final = {"type": "DisruptionTarget", "status": "True"}

HEAD: Final = """\
# Workers of run {run_id}, whose coordinator is {coordinator}.
# A pod that ends with {preempted} was preempted: it comes back, and counts as no failure.
"""


def kubernetes_job(launch: WorkerLaunch, shape: PodShape) -> Object:
    """Return the Job.

    Raises InvalidInputError for workers that do not fill their pods, for names and labels that
    Kubernetes does not have, and for a network without certificates that nobody has allowed.
    """
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
    """Writes equal parts out each time, in place of references to the first one."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_text(job: Object, launch: WorkerLaunch) -> str:
    """Return the file that kubectl is given."""
    head = HEAD.format(run_id=launch.run_id, coordinator=launch.coordinator, preempted=PREEMPTED)
    return head + yaml.dump(job, Dumper=_Plain, sort_keys=False, width=1000)


def check_submit() -> None:
    """Raise UnavailableError where kubectl is missing."""
    check_program("kubectl", _WHERE)


def submit(path: Path) -> str:
    """Hand a file to kubectl, and return what it says of it. Raises UnavailableError."""
    return answer_of(["kubectl", "create", "-f", str(path)], _WHERE)


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
            "without a certificate nothing is encrypted: say it with --pool, or, for a network "
            "that you trust, --worker --allow-insecure-network"
        )
        raise InvalidInputError.at("--tls-secret", problem)
    own = {word.partition("=")[0] for word in launch.command}
    for name in said_of(shape):
        if name in own:
            raise InvalidInputError.at("--worker", f"{name} is said by the launch; leave it out")


def _check_names(shape: PodShape) -> None:
    """Check what Kubernetes would refuse, or would look for in vain, after the run is submitted."""
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
