"""Commands that show the course of a run: its report, and the generations of a population."""

import json
import time
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from stratagem.client.cli.options import (
    CoordinatorOption,
    Format,
    FormatOption,
    RunArgument,
    RunsArgument,
)
from stratagem.client.cli.progress import print_line
from stratagem.client.cli.query_commands import connected
from stratagem.client.cli.reporting import make_console
from stratagem.client.course.population import Population
from stratagem.client.course.replay import replayed
from stratagem.client.report.pages.comparison_page import comparison_page
from stratagem.client.report.run_values import time_text
from stratagem.client.sdk.async_client import DEFAULT_ADDRESS
from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.base.text import values_text
from stratagem.common.rpc.channel import PLAINTEXT, Proof


def report(
    run_ids: RunsArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="RUN.html if not named, of several runs comparison.html.",
        ),
    ] = None,
) -> None:
    """Write a run, or a comparison of up to 8, as one page of HTML.

    That of a run holds curves, a panel for the strategy, the events and the job; an error of your
    code comes first. That of several holds what they have reached, the fields in which their jobs
    differ, and curves with a line for each. Neither needs scripts or a network, and both print
    well. Of a run that goes on they show what has happened so far.
    """
    with connected(coordinator, proof) as client:
        if len(run_ids) == 1:
            path = client.get(run_ids[0]).report(output or Path(f"{run_ids[0]}.html"))
        else:
            path = output or Path("comparison.html")
            text = comparison_page(client.compare(run_ids), time_text(time.time()))
            path.write_text(text, encoding="utf-8")
        print_line(make_console(), str(path))


def population(
    run_id: RunArgument,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    form: FormatOption = Format.TEXT,
    schedule: Annotated[
        Path | None,
        typer.Option(
            "--schedule", metavar="FILE", help="Write a job that trains the winner again."
        ),
    ] = None,
) -> None:
    """Show the generations of a population, and its winner.

    The lineage names, generation by generation, the member whose state the winner's comes from; the
    schedule all hyperparameters that this state was trained with.

    --schedule writes it as a job without a population: `stratagem run FILE` ends with the winner's
    state, to the bit. A FILE.json is JSON, any other YAML; what is there already is left alone.
    """
    with connected(coordinator, proof) as client:
        if schedule is not None and schedule.exists():
            text = f"{schedule} is there already; nothing was written"
            raise InvalidInputError.at("--schedule", text)
        run = client.get(run_id)
        found = run.population()
        if not found.generations:
            raise NotFoundError(f"run {run_id} is no population, or has not begun")
        if schedule is not None:
            document = replayed(found, run.status().job).document()
            is_json = schedule.suffix == ".json"
            text = json.dumps(document) if is_json else yaml.safe_dump(document, sort_keys=False)
            schedule.write_text(text, encoding="utf-8")
        if form is Format.JSON:
            print(json.dumps(_as_json(found), allow_nan=False))
        else:
            _print(make_console(), found)
            if schedule is not None:
                print_line(make_console(), f"schedule written to {schedule}")


def _print(console: Console, found: Population) -> None:
    table = Table("generation", "best", found.metric, "median", "copies", box=box.SIMPLE_HEAD)
    for generation, following in zip_longest(found.generations, found.generations[1:]):
        scores = sorted(m.score for m in generation.members if m.score is not None)
        best = None if generation.best is None else generation.of(generation.best)
        begun = () if following is None else following.members
        copies = [f"{m.member} from {m.parent}" for m in begun if m.parent != m.member]
        table.add_row(
            str(generation.number),
            "" if best is None else f"member {best.member}",
            "" if best is None or best.score is None else f"{best.score:.4g}",
            f"{scores[len(scores) // 2]:.4g}" if scores else "",
            ", ".join(copies),
        )
    console.print(table)
    winner = found.best
    if winner is None:
        return
    print_line(console, f"best: {winner}")
    lineage = found.lineage(winner.member, winner.generation)
    print_line(console, f"lineage: {' > '.join(f'member {member}' for member in lineage)}")
    for step, params in found.schedule(winner.member, winner.generation):
        print_line(console, f"from step {step}: {values_text(params)}")


def _as_json(found: Population) -> dict[str, object]:
    best = found.best
    generations = [
        {
            "generation": generation.number,
            "best": generation.best,
            "step": generation.step,
            "members": [
                {
                    "member": each.member,
                    "parent": each.parent,
                    "score": each.score,
                    "params": dict(each.params),
                }
                for each in generation.members
            ],
        }
        for generation in found.generations
    ]
    winner = None
    if best is not None:
        schedule = found.schedule(best.member, best.generation)
        winner = {
            "generation": best.generation,
            "member": best.member,
            "score": best.score,
            "params": dict(best.params),
            "lineage": found.lineage(best.member, best.generation),
            "schedule": [{"from_step": step, "params": dict(params)} for step, params in schedule],
        }
    return {
        "metric": found.metric,
        "mode": found.mode,
        "generations": generations,
        "best": winner,
    }
