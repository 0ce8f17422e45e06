"""`stratagem launch`: a run, and workers for it that an engine starts on many machines."""

import sys
from importlib.metadata import version
from pathlib import Path
from shlex import split
from typing import Annotated, Final

import typer

from stratagem.client.cli.queries import client_of
from stratagem.client.cli.run import JobArgument, RunIdOption, SetOption
from stratagem.client.cli.shared import CoordinatorOption, complain, reporting, with_proof
from stratagem.client.launch import kubernetes as kubernetes_job
from stratagem.client.launch import kubernetes as kubernetes_pod
from stratagem.client.launch import ray as ray_script
from stratagem.client.launch import slurm as slurm_script
from stratagem.client.launch.workers import (
    WorkerLaunch,
    check_addresses,
    check_options,
    launch_of,
    submitted_run,
)
from stratagem.client.sdk.client import DEFAULT_ADDRESS
from stratagem.client.sdk.torch_process import import_folders
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import RunId, check_run_id, new_run_id
from stratagem.common.base.text import is_loopback, split_address
from stratagem.common.job import JobSpec, load_job
from stratagem.common.rpc.channel import PLAINTEXT, Proof, split_addresses

TAKES_OPTIONS: Final = {"allow_extra_args": True, "ignore_unknown_options": False}

NumOption = Annotated[
    int, typer.Option("-n", "--workers", metavar="N", min=1, help="How many workers.")
]
WorkerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="OPTIONS",
        help="Options of each worker, as '--threads 4 --tags fast'; repeatable.",
    ),
]
PrintOption = Annotated[
    bool,
    typer.Option("--print", help="Only print what would be handed over; submit nothing."),
]
ServiceOption = Annotated[
    str,
    typer.Option(
        "--service", metavar="HOST:PORT", help="The coordinator as the workers' pods reach it."
    ),
]
NamespaceOption = Annotated[str, typer.Option("--namespace", metavar="NAME", help="Of the pods.")]
ImageOption = Annotated[
    str | None,
    typer.Option(
        "--image", metavar="IMAGE", show_default="stratagem-worker of this version", help="Theirs."
    ),
]
PerPodOption = Annotated[
    int, typer.Option("--per-pod", metavar="K", help="Workers of each pod, as for whole nodes.")
]
CpusOption = Annotated[
    int, typer.Option("--cpus", metavar="N", min=1, help="CPUs of each worker: its threads.")
]
MemoryOption = Annotated[
    str, typer.Option("--memory", metavar="QUANTITY", help="Memory of each worker.")
]
GpusOption = Annotated[
    int, typer.Option("--gpus", metavar="N", min=0, max=1, help="GPUs of each worker, 0 or 1.")
]
QueueOption = Annotated[
    str | None,
    typer.Option("--queue", metavar="QUEUE", help="Kueue's local queue that starts the pods."),
]
TlsSecretOption = Annotated[
    str | None,
    typer.Option(
        "--tls-secret",
        metavar="NAME",
        help="Of the namespace, with ca.crt, pool-POOL.crt and pool-POOL.key.",
    ),
]
PoolOption = Annotated[
    str | None,
    typer.Option("--pool", metavar="POOL", help="The pool whose certificate the workers have."),
]
MetricsOption = Annotated[
    bool, typer.Option("--metrics/--no-metrics", help="Whether the workers serve metrics.")
]
NodeLabelOption = Annotated[
    list[str] | None,
    typer.Option("--node-label", metavar="KEY=VALUE", help="Of the pods' nodes; repeatable."),
]
JobNameOption = Annotated[
    str | None,
    typer.Option(
        "--job-name",
        metavar="NAME",
        show_default="the run's id",
        help="Of the Job, as for a second kind of nodes beside the first.",
    ),
]

launch = typer.Typer(
    help="Submit a job, and let an engine start workers for it.", no_args_is_help=True
)


@launch.callback()
def _launch() -> None:
    pass


def slurm(  # noqa: PLR0913  (each parameter is an option of the command line)
    context: typer.Context,
    job_path: JobArgument,
    workers: NumOption,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    overrides: SetOption = None,
    run_id: RunIdOption = None,
    worker: WorkerOption = None,
    only_print: PrintOption = False,
) -> None:
    """Submit a job, and a batch job of Slurm with workers for it.

    The script, RUN.sbatch in this folder, is what sbatch is given: read it, change it, hand it over
    again. Options after -- are sbatch's, as in `-- --partition=gpu --gpus-per-task=1`. Workers
    leave when the run has ended; those that are preempted commit, leave, and their job is put back
    into the queue.
    """
    with reporting():
        job, chosen = _job_of(job_path, overrides, run_id)
        wanted = _launch_here(job, chosen, coordinator, workers, job_path, worker)
        text = slurm_script.slurm_script(wanted, tuple(context.args))
        _warn_of_loopback(coordinator)
        if only_print:
            print(text, end="")
            return
        slurm_script.check_submit()
        script = Path(f"{chosen}.sbatch")
        script.write_text(text)
        with client_of(coordinator, proof) as client, submitted_run(client, job, chosen, job_path):
            number = slurm_script.submit(script)
        _tell(chosen, coordinator, f"Slurm's job {number}, of {script}")


def kubernetes(  # noqa: PLR0913  (each parameter is an option of the command line)
    job_path: JobArgument,
    workers: NumOption,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    overrides: SetOption = None,
    run_id: RunIdOption = None,
    worker: WorkerOption = None,
    service: ServiceOption = "stratagem-coordinator:7070",
    namespace: NamespaceOption = "stratagem",
    image: ImageOption = None,
    per_pod: PerPodOption = 1,
    cpus: CpusOption = 2,
    memory: MemoryOption = "8Gi",
    gpus: GpusOption = 0,
    queue: QueueOption = None,
    tls_secret: TlsSecretOption = None,
    pool: PoolOption = None,
    metrics: MetricsOption = True,
    node_label: NodeLabelOption = None,
    job_name: JobNameOption = None,
    only_print: PrintOption = False,
) -> None:
    """Submit a job, and an Indexed Job of Kubernetes with workers for it.

    The file, RUN.yaml in this folder, is what kubectl is given: read it, change it, hand it over
    again. Workers leave when the run has ended; a pod that is preempted or whose node is drained
    commits, leaves, and comes back. The image has the modules that the job names, under /srv/code,
    or the job brings its code along. For a second kind of nodes launch the same job again, with
    --run-id, --job-name and --node-label.
    """
    with reporting():
        job, chosen = _job_of(job_path, overrides, run_id)
        words = _words(worker)
        inside = (kubernetes_pod.CODE,)
        check_addresses("--service", service)
        wanted = launch_of(job, chosen, service, workers, "python", inside, words)
        name = "stratagem-worker-gpu" if gpus else "stratagem-worker"
        shape = kubernetes_pod.PodShape(
            namespace=namespace,
            image=image or f"{name}:{version('stratagem')}",
            per_pod=per_pod,
            cpus=cpus,
            memory=memory,
            gpus=gpus,
            queue=queue,
            secret=tls_secret,
            pool=pool,
            metrics=metrics,
            node_labels=tuple(node_label or ()),
            job_name=job_name,
        )
        text = kubernetes_job.as_text(kubernetes_job.kubernetes_job(wanted, shape), wanted)
        _warn_of_loopback(service)
        if only_print:
            print(text, end="")
            return
        kubernetes_job.check_submit()
        path = Path(f"{job_name or chosen}.yaml")
        path.write_text(text)
        with client_of(coordinator, proof) as client, submitted_run(client, job, chosen, job_path):
            said = kubernetes_job.submit(path)
        _tell(chosen, coordinator, f"{said}, of {path}")


def ray(  # noqa: PLR0913  (each parameter is an option of the command line)
    context: typer.Context,
    job_path: JobArgument,
    workers: NumOption,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    overrides: SetOption = None,
    run_id: RunIdOption = None,
    worker: WorkerOption = None,
    cpus: CpusOption = 2,
    gpus: GpusOption = 0,
    only_print: PrintOption = False,
) -> None:
    """Submit a job, and to a cluster of Ray a program that keeps workers for it.

    The program, RUN.ray.py in this folder, is what `ray job submit` is given: read it, change it,
    hand it over again. Options after -- are those of `ray job submit`, as in `--
    --address=http://head:8265`. Workers leave when the run has ended; those whose node goes come
    back on another.
    """
    with reporting():
        check_options(context.args, "ray job submit")
        job, chosen = _job_of(job_path, overrides, run_id)
        wanted = _launch_here(job, chosen, coordinator, workers, job_path, worker)
        host = split_address(split_addresses(coordinator)[0])[0]
        text = ray_script.ray_script(wanted, cpus, gpus, host)
        _warn_of_loopback(coordinator)
        if only_print:
            print(text, end="")
            return
        ray_script.check_submit()
        script = Path(f"{chosen}.ray.py")
        script.write_text(text)
        with client_of(coordinator, proof) as client, submitted_run(client, job, chosen, job_path):
            ray_script.submit(script, wanted, tuple(context.args))
        _tell(chosen, coordinator, f"Ray's job {chosen}, of {script}")


def _job_of(
    job_path: Path, overrides: list[str] | None, run_id: str | None
) -> tuple[JobSpec, RunId]:
    job = load_job(job_path, overrides or [])
    return job, new_run_id(job.name) if run_id is None else check_run_id(run_id)


def _launch_here(
    job: JobSpec,
    run_id: RunId,
    coordinator: str,
    num_workers: int,
    job_path: Path,
    worker: list[str] | None,
) -> WorkerLaunch:
    """Return a launch on nodes that have this Python and the user's folders at the same places."""
    check_addresses("--coordinator", coordinator)
    folders = tuple(str(folder.resolve()) for folder in import_folders(job_path))
    words = _words(worker)
    return launch_of(job, run_id, coordinator, num_workers, sys.executable, folders, words)


def _tell(run_id: RunId, coordinator: str, what: str) -> None:
    print(f"run {run_id}; {what}")
    print(f"follow it with: stratagem attach {run_id} --coordinator {coordinator}")


def _words(texts: list[str] | None) -> tuple[str, ...]:
    try:
        return tuple(word for text in texts or () for word in split(text))
    except ValueError as error:  # a quotation that does not end
        raise InvalidInputError.at("--worker", f"{' '.join(texts or ())!r}: {error}") from None


def _warn_of_loopback(coordinator: str) -> None:
    hosts = [split_address(address)[0] for address in split_addresses(coordinator)]
    if any(map(is_loopback, hosts)):
        complain(f"{coordinator} is this machine alone: workers elsewhere do not reach it")


launch.command("slurm", context_settings=TAKES_OPTIONS)(with_proof(slurm))
launch.command("kubernetes")(with_proof(kubernetes))
launch.command("ray", context_settings=TAKES_OPTIONS)(with_proof(ray))
