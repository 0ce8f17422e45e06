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
    int, typer.Option("-n", "--workers", metavar="N", min=1, help="Number of workers.")
]
WorkerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker",
        metavar="OPTIONS",
        help="Options for each worker, such as '--threads 4 --tags fast'; repeatable.",
    ),
]
PrintOption = Annotated[
    bool,
    typer.Option("--print", help="Print what would be submitted, and submit nothing."),
]
ServiceOption = Annotated[
    str,
    typer.Option(
        "--service",
        metavar="HOST:PORT",
        help="Address at which the workers' pods reach the coordinator.",
    ),
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", metavar="NAME", help="Namespace of the pods.")
]
ImageOption = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="IMAGE",
        show_default="stratagem-worker of this version",
        help="Container image of the pods.",
    ),
]
PerPodOption = Annotated[
    int,
    typer.Option(
        "--per-pod",
        metavar="K",
        help="Number of workers in each pod, for example to use whole nodes.",
    ),
]
CpusOption = Annotated[
    int,
    typer.Option(
        "--cpus", metavar="N", min=1, help="Number of CPUs, and so of threads, of each worker."
    ),
]
MemoryOption = Annotated[
    str, typer.Option("--memory", metavar="QUANTITY", help="Memory of each worker.")
]
GpusOption = Annotated[
    int, typer.Option("--gpus", metavar="N", min=0, max=1, help="GPUs of each worker, 0 or 1.")
]
QueueOption = Annotated[
    str | None,
    typer.Option("--queue", metavar="QUEUE", help="Kueue LocalQueue that admits the pods."),
]
TlsSecretOption = Annotated[
    str | None,
    typer.Option(
        "--tls-secret",
        metavar="NAME",
        help="Secret in the namespace with ca.crt, pool-POOL.crt and pool-POOL.key.",
    ),
]
PoolOption = Annotated[
    str | None,
    typer.Option("--pool", metavar="POOL", help="Pool whose certificate the workers use."),
]
MetricsOption = Annotated[
    bool, typer.Option("--metrics/--no-metrics", help="Whether the workers serve metrics.")
]
NodeLabelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--node-label",
        metavar="KEY=VALUE",
        help="Label of the nodes to run the pods on; repeatable.",
    ),
]
JobNameOption = Annotated[
    str | None,
    typer.Option(
        "--job-name",
        metavar="NAME",
        show_default="the run's id",
        help="Name of the Job, for example to add workers on a second kind of node.",
    ),
]

launch = typer.Typer(
    help="Submit a job, and have an engine start workers for it.", no_args_is_help=True
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
    """Submit a job, and a Slurm batch job with workers for it.

    The script, RUN.sbatch in this folder, is what is passed to sbatch: you can read it, change it
    and submit it again. Options after -- are passed to sbatch, as in
    `-- --partition=gpu --gpus-per-task=1`. Workers exit when the run has ended; preempted ones
    commit and exit, and their Slurm job is requeued.
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
    """Submit a job, and a Kubernetes Job with workers for it.

    The manifest of an Indexed Job, RUN.yaml in this folder, is what is passed to kubectl: you can
    read it, change it and submit it again. Workers exit when the run has ended; a pod that is
    preempted, or whose node is drained, commits, exits and comes back. The image must have the
    modules that the job names, under /srv/code, unless the job brings its code along. For a second
    kind of node, launch the same job again, with --run-id, --job-name and --node-label.
    """
    with reporting():
        job, chosen = _job_of(job_path, overrides, run_id)
        words = _words(worker)
        inside = (kubernetes_job.CODE,)
        check_addresses("--service", service)
        wanted = launch_of(job, chosen, service, workers, "python", inside, words)
        name = "stratagem-worker-gpu" if gpus else "stratagem-worker"
        shape = kubernetes_job.PodShape(
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
    """Submit a job, and a Ray job that keeps workers running for it.

    The program, RUN.ray.py in this folder, is what is passed to `ray job submit`: you can read it,
    change it and submit it again. Options after -- are passed to `ray job submit`, as in
    `-- --address=http://head:8265`. Workers exit when the run has ended; workers that lose their
    node are started again on another.
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
