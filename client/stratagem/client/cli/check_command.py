"""The command that looks for faults of a job before it is submitted."""

import typer

from stratagem.client.cli.options import Format, FormatOption, OptionalCoordinatorOption
from stratagem.client.cli.planning_commands import DeviceOption, workers_of
from stratagem.client.cli.reporting import FAILED, complain, make_console, reporting
from stratagem.client.cli.run_commands import JobArgument, SetOption
from stratagem.client.sdk.job_check import check_job
from stratagem.client.sdk.torch_process import import_folders
from stratagem.client.terminal import tables
from stratagem.common.job import load_job
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.rpc.channel import PLAINTEXT, Proof


def check(
    job_path: JobArgument,
    overrides: SetOption = None,
    coordinator: OptionalCoordinatorOption = None,
    proof: Proof = PLAINTEXT,
    device: DeviceOption = "",
    form: FormatOption = Format.TEXT,
) -> None:
    """Find the faults of a job, all at once, before it is submitted.

    Tries a little of each part here, in a process of its own: all fields, all entry points, the
    model with its groups, the data (made twice, and compared), some rows from all over each split,
    one real step (with partition_state two more, of a worker that keeps a slice), a step from a
    saved state, the metrics, and how much memory is needed. What other rows or later steps lead
    into is found by the run alone. Submits nothing.

    Each row is printed as it is found, as JSON all together. What takes long is told with its
    place, at Ctrl-C too.

    Exit code: 0 without a fault (there may be warnings), else 1.
    """
    so_far, console = list[Finding](), make_console()

    def tell(finding: Finding) -> None:
        so_far.append(finding)
        if form is Format.TEXT:
            tables.print_finding(console, finding, is_first=len(so_far) == 1)

    with reporting():
        workers = workers_of(coordinator, proof)
        try:
            check_job(
                lambda: load_job(job_path, overrides or []),
                workers=workers,
                device=device,
                import_path=import_folders(job_path),
                tell=tell,
                complain=complain,
            )
        finally:
            if form is Format.JSON:
                print(tables.many_to_json(so_far))
    if any(finding.level is Level.FAIL for finding in so_far):
        raise typer.Exit(FAILED)
