"""Define the commands that verify the bits of a run, and compare those of two."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from stratagem.client.cli.queries import connected
from stratagem.client.cli.shared import (
    CoordinatorOption,
    Format,
    FormatOption,
    RunArgument,
    make_console,
    print_line,
)
from stratagem.client.course.claims import Claim, RunClaims, first_difference
from stratagem.client.report.comparison import job_differences
from stratagem.client.sdk.blocking import Client
from stratagem.client.sdk.client import DEFAULT_ADDRESS
from stratagem.client.sdk.verification import (
    Conclusion,
    Difference,
    Verification,
    certificate,
    check_certificate,
    first_step,
    read_certificate,
)
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import counted
from stratagem.common.rpc.channel import PLAINTEXT, Proof

DIFFERS, INCOMPLETE = 1, 3
"""Exit codes: a claim differs; some could not be verified."""
SENTENCES: Mapping[Conclusion, str] = {
    Conclusion.RUN: "the run was wrong: two other executions agree with each other, "
    "and not with it",
    Conclusion.VERIFIER: "the verifier was wrong: a third execution agrees with the run",
    Conclusion.JOB: "the job does not repeat itself: three executions have three results; "
    "something in it draws numbers or reads data that its seed does not determine",
    Conclusion.OPEN: "who is wrong is open: the third execution has failed",
}


def verify(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run, or a certificate.json.")],
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    segments: Annotated[
        str | None, typer.Option(help="Only these segments, such as 3,7:9; default all.")
    ] = None,
    sample: Annotated[
        float | None, typer.Option(help="Only this share of the segments, the same each time.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="Write a certificate to this file."),
    ] = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Compute the states of a run again, and compare digests.

    The run must have ended. Its job is executed again on the workers that the coordinator has now,
    from a stored state before the wanted segments if there is one, and each state and each client's
    update is compared as it comes. Where one differs, a third execution decides who is wrong.

    RUN may be the file of a certificate: its digests are then compared with those that the
    coordinator has recorded, and nothing is computed.

    Exit codes: 0 all equal, 1 one differs, 3 some could not be verified.
    """
    with connected(coordinator, proof) as client:
        if run_id.endswith(".json"):
            num = check_certificate(read_certificate(Path(run_id)), _claims(client, run_id))
            print_line(make_console(), f"{run_id}: the run has recorded these {num} digests")
            return
        begun_s = time.monotonic()
        lines = form is Format.TEXT
        found = client.verify(
            run_id,
            segments=None if segments is None else read_segments(segments),
            sample=sample,
            on_claim=_print_claim if lines else lambda _run, _again: None,
        )
        if output is not None:
            document = certificate(client.get(run_id).status(), found, time.time())
            output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if lines:
        for line in describe(found, time.monotonic() - begun_s):
            print_line(make_console(), line)
    else:
        print(json.dumps(as_json(found), allow_nan=False))
    if found.difference is not None:
        raise typer.Exit(DIFFERS)
    if found.unverified:
        raise typer.Exit(INCOMPLETE)


def _claims(client: Client, path: str) -> RunClaims:
    return RunClaims.of(client.get(read_certificate(Path(path))["run"]).events())


def _print_claim(run: Claim, again: Claim) -> None:
    if run.digest == again.digest:
        text = f"{run.place}: {run.digest[:16]}, equal"
    else:
        text = f"{run.place}: {run.digest} in the run, {again.digest} again"
    print_line(make_console(), text)


def read_segments(text: str) -> set[int]:
    """Return the numbers that a text such as "3,7:9" names."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition(":")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal():
            raise InvalidInputError.at("--segments", f"{text!r} is not such as 3,7:9")
        found.update(range(int(first), int(last or first) + 1))
    return found


def describe(found: Verification, seconds: float) -> Iterator[str]:
    """Yield the lines that tell the result of a verification."""
    for reason in dict.fromkeys(found.unverified.values()):
        places = [place for place, why in found.unverified.items() if why == reason]
        yield f"not verified: {places[0]} and {len(places) - 1} more: {reason}"
    if found.difference is None:
        num = len(found.equal) + len(found.unverified)
        by = f" on {', '.join(found.workers)}" if found.workers else ""
        yield f"verified {len(found.equal)} of {counted(num, 'digest')}{by} in {seconds:.1f} s"
    else:
        yield from _of_difference(found.difference)
        yield SENTENCES[found.conclusion]


def _of_difference(difference: Difference) -> Iterator[str]:
    run, again = difference.claim, difference.again
    yield f"first difference: {run.place}, by {_by(run)} in the run and {_by(again)} again"
    if difference.step is not None and difference.values is not None:
        mine, theirs = difference.values
        yield f"{difference.series} differs first at step {difference.step}: {mine!r}, {theirs!r}"
    yield f"the other state is kept: stratagem download {difference.run_id}"


def _by(claim: Claim) -> str:
    return ", ".join(claim.workers) or "unknown workers"


def as_json(found: Verification) -> dict[str, Any]:
    """Return a verification as plain JSON values."""
    difference = found.difference
    return {
        "run": found.run_id,
        "conclusion": found.conclusion,
        "equal": len(found.equal),
        "unverified": {str(place): reason for place, reason in found.unverified.items()},
        "workers": list(found.workers),
        "difference": None
        if difference is None
        else {
            "place": str(difference.claim.place),
            "digests": [difference.claim.digest, difference.again.digest],
            "workers": [list(difference.claim.workers), list(difference.again.workers)],
            "third": None if difference.third is None else difference.third.digest,
            "step": difference.step,
            "series": difference.series,
            "values": difference.values,
            "run": difference.run_id,
        },
    }


def compare(
    run_id: RunArgument,
    other_id: Annotated[str, typer.Argument(metavar="OTHER", help="The other run.")],
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
    proof: Proof = PLAINTEXT,
    bits: Annotated[
        bool, typer.Option("--bits", help="Find the first state and the first step that differ.")
    ] = False,
) -> None:
    """Show how two runs differ, with --bits to the bit.

    Only what the coordinator has recorded is read: the jobs, the digests of states and updates, and
    the history of steps. Exit codes: 0 nothing differs, 1 something does.
    """
    with connected(coordinator, proof) as client:
        runs = [client.get(each) for each in (run_id, other_id)]
        lines = [
            f"{each.key}: {each.values[0]!r} and {each.values[1]!r}"
            for each in job_differences([dict(run.status().job) for run in runs])
        ]
        if bits:
            lines += _different_bits(*(RunClaims.of(run.events()) for run in runs))
            if first := first_step(*(run.history() for run in runs)):
                step, series, (mine, theirs) = first
                lines.append(f"{series} differs first at step {step}: {mine!r} and {theirs!r}")
    for line in lines or ["nothing differs"]:
        print_line(make_console(), line)
    if lines:
        raise typer.Exit(DIFFERS)


def _different_bits(run: RunClaims, other: RunClaims) -> Iterator[str]:
    found = first_difference(run, other)
    if found is None:
        return
    mine, theirs = found
    places = list(run.by_place)
    if (number := places.index(mine.place)) > 0:
        yield f"equal up to {places[number - 1]}"
    yield f"{mine.place}: {mine.digest} by {_by(mine)} and {theirs.digest} by {_by(theirs)}"
    if mine.numerics != theirs.numerics:
        yield f"numerics differ: {mine.numerics} and {theirs.numerics}"
