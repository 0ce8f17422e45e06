"""Define `stratagem launch`: submit a run, and have an engine start workers for it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shlex import split
from typing import Annotated, Final

import typer

from stratagem.client.cli.run import JobArgument, RunIdOption, SetOption
from stratagem.client.cli.shared import Access, AccessOptions, MadeBy, as_command, complain
from stratagem.client.launch import kubernetes as kubernetes_job
from stratagem.client.launch import scripts
from stratagem.client.launch.workers import (
    SiteProgram,
    WorkerLaunch,
    check_addresses,
    check_options,
    launch_of,
    submitted_run,
)
from stratagem.client.sdk.torch_process import import_folders
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import RunId, check_run_id, new_run_id
from stratagem.common.base.text import is_loopback, split_address
from stratagem.common.job import JobSpec, load_job
from stratagem.common.rpc.channel import split_addresses

TAKES_OPTIONS: Final = {"allow_extra_args": True, "ignore_unknown_options": False}

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


@dataclass(frozen=True, slots=True)
class _Request:
    """A run to submit together with workers that an engine, such as Slurm, starts for it."""

    job_path: Path
    job: JobSpec
    run_id: RunId
    num_workers: int
    worker_options: tuple[str, ...]
    access: Access

    def launch_here(self) -> WorkerLaunch:
        """Describe workers for nodes with this Python, and the user's folders at the same paths."""
        check_addresses("--coordinator", self.access.coordinator)
        folders = tuple(str(folder.resolve()) for folder in import_folders(self.job_path))
        return self.launch(self.access.coordinator, sys.executable, folders)

    def launch(self, coordinator: str, python: str, folders: tuple[str, ...]) -> WorkerLaunch:
        """Return the description of the workers to start, as `launch_of` makes it."""
        of_each = (self.num_workers, python, folders, self.worker_options)
        return launch_of(self.job, self.run_id, coordinator, *of_each)

    def submit(
        self,
        launch: WorkerLaunch,
        program: SiteProgram,
        file: Path,
        text: str,
        submit: Callable[[], str],
        *,
        only_print: bool,
    ) -> None:
        """Submit the run here, and the file with its workers to the engine; or only print the file.
        submit: hands the file to the engine, and returns the name of the engine's job."""
        hosts = [split_address(host_port)[0] for host_port in split_addresses(launch.coordinator)]
        if any(map(is_loopback, hosts)):
            complain(f"only this machine can reach {launch.coordinator}; workers elsewhere cannot")
        if only_print:
            print(text, end="")
            return
        program.check()
        file.write_text(text)
        with (
            self.access.client() as client,
            submitted_run(client, self.job, self.run_id, self.job_path),
        ):
            name = submit()
        print(f"run {self.run_id}; {name}, of {file}")
        address = self.access.coordinator
        print(f"follow it with: stratagem attach {self.run_id} --coordinator {address}")


def _request(
    job_path: JobArgument,
    workers: Annotated[
        int, typer.Option("-n", "--workers", metavar="N", min=1, help="Number of workers.")
    ],
    access: AccessOptions,
    overrides: SetOption = None,
    run_id: RunIdOption = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            metavar="OPTIONS",
            help="Options for each worker, such as '--threads 4 --tags fast'; repeatable.",
        ),
    ] = None,
) -> _Request:
    job = load_job(job_path, overrides or [])
    chosen = new_run_id(job.name) if run_id is None else check_run_id(run_id)
    return _Request(job_path, job, chosen, workers, _words(worker or []), access)


RequestOptions = Annotated[_Request, MadeBy(_request)]

launch = typer.Typer(
    help="Submit a job, and have an engine start workers for it.", no_args_is_help=True
)


@launch.callback()
def _launch() -> None:
    pass


def slurm(
    context: typer.Context,
    request: RequestOptions,
    only_print: PrintOption = False,
) -> None:
    """Submit a job, and a Slurm batch job with workers for it.

    The script, RUN.sbatch in this folder, is what is passed to sbatch: you can read it, change it
    and submit it again. Options after -- are passed to sbatch, as in
    `-- --partition=gpu --gpus-per-task=1`. Workers exit when the run has ended; preempted ones
    commit and exit, and their Slurm job is requeued.
    """
    wanted = request.launch_here()
    text = scripts.slurm_script(wanted, tuple(context.args))
    script = Path(f"{request.run_id}.sbatch")

    def submit() -> str:
        return f"Slurm's job {scripts.submit_to_slurm(script)}"

    request.submit(wanted, scripts.SBATCH, script, text, submit, only_print=only_print)


def kubernetes(  # noqa: PLR0913  (each parameter is an option of the command line)
    request: RequestOptions,
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
    check_addresses("--service", service)
    wanted = request.launch(service, "python", (kubernetes_job.CODE,))
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
    path = Path(f"{job_name or request.run_id}.yaml")
    submit = partial(kubernetes_job.submit, path)
    request.submit(wanted, kubernetes_job.KUBECTL, path, text, submit, only_print=only_print)


def ray(
    context: typer.Context,
    request: RequestOptions,
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
    check_options(context.args, "ray job submit")
    wanted = request.launch_here()
    host = split_address(split_addresses(wanted.coordinator)[0])[0]
    text = scripts.ray_script(wanted, cpus, gpus, host)
    script = Path(f"{request.run_id}.ray.py")

    def submit() -> str:
        scripts.submit_to_ray(script, wanted, tuple(context.args))
        return f"Ray's job {request.run_id}"

    request.submit(wanted, scripts.RAY, script, text, submit, only_print=only_print)


def _words(texts: list[str]) -> tuple[str, ...]:
    try:
        return tuple(word for text in texts for word in split(text))
    except ValueError as error:  # an unclosed quotation mark
        raise InvalidInputError.at("--worker", f"{' '.join(texts)!r}: {error}") from None


launch.command("slurm", context_settings=TAKES_OPTIONS)(as_command(slurm))
launch.command("kubernetes")(as_command(kubernetes))
launch.command("ray", context_settings=TAKES_OPTIONS)(as_command(ray))
