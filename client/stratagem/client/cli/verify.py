"""Define the commands that verify the bits of a run, and compare those of two."""

import json
import math
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from stratagem.client.cli.shared import (
    AccessOptions,
    Format,
    FormatOption,
    RunArgument,
    complain,
    make_console,
    print_line,
)
from stratagem.client.course.claims import Claim, RunClaims, first_difference
from stratagem.client.report.comparison import job_differences
from stratagem.client.sdk.blocking import Client
from stratagem.client.sdk.verification import (
    Difference,
    Verification,
    certificate,
    check_certificate,
    read_certificate,
)
from stratagem.client.sdk.verification_plan import first_step
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import counted
from stratagem.common.numerics.verification import Conclusion

DIFFERS, INCOMPLETE = 4, 3
"""Exit codes: a claim (digest) of the run differs; some claims could not be verified."""
MOST_SEGMENTS = 1_000_000
"""The largest number of segments in one range; a larger range is taken for a mistake."""
SENTENCES: Mapping[Conclusion, str] = {
    Conclusion.RUN: "the run was wrong: two other executions agree with each other, "
    "and not with it",
    Conclusion.VERIFIER: "the verifier was wrong: a third execution agrees with the run",
    Conclusion.JOB: "the job does not repeat itself: three executions have three results; "
    "something in it draws numbers or reads data that its seed does not determine",
    Conclusion.OPEN: "who is wrong is open, as there is no third execution",
}


def verify(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run, or a certificate.json.")],
    access: AccessOptions,
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
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Key to sign a certificate with, or public key to check it with."
        ),
    ] = None,
    form: FormatOption = Format.TEXT,
) -> None:
    """Compute the states of a run again, and compare digests.

    The run must have ended. Its job is executed again on the workers that the coordinator has now,
    from a stored state before the wanted segments if there is one, and each state and each client's
    update is compared as it comes. Where one differs, a third execution decides who is wrong.

    RUN may be the file of a certificate: its digests are then compared with those that the
    coordinator has recorded, and nothing is computed. `code keygen` makes keys for --key.

    Exit codes: 0 all equal, 4 one differs, 3 some could not be verified.
    """
    with access.client() as client:
        if run_id.endswith(".json"):
            if (segments, sample, output, form) != (None, None, None, Format.TEXT):
                text = f"{run_id} is a certificate, and is checked as a whole; leave options out"
                raise InvalidInputError.at("RUN", text)
            print_line(make_console(), _checked(client, run_id, key))
            return
        if key is not None and output is None:
            raise InvalidInputError.at("--key", "signs a certificate; add --certificate FILE")
        if output is not None and (output.exists() or not output.parent.is_dir()):
            raise InvalidInputError.at("--certificate", f"{output} exists, or its folder does not")
        # Like Ctrl-C, so that the verifying run is deleted.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        begun_s, console, is_text = time.monotonic(), make_console(), form is Format.TEXT
        result = client.verify(
            run_id,
            segments=None if segments is None else read_segments(segments),
            sample=sample,
            on_claim=lambda *pair: print_line(console, _compared(*pair)) if is_text else None,
        )
        if is_text:
            for line in describe(result, time.monotonic() - begun_s):
                print_line(console, line)
        else:
            print(json.dumps(as_json(result), allow_nan=False))
        if output is not None and result.difference is None and result.equal:
            document = certificate(client.get(run_id).status(), result, time.time(), key)
            output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        elif output is not None:
            complain(f"{output} was not written: nothing is certified")
    if result.difference is not None:
        raise typer.Exit(DIFFERS)
    if result.unverified:
        raise typer.Exit(INCOMPLETE)


def _checked(client: Client, path: str, key: Path | None) -> str:
    document = read_certificate(Path(path), key)
    run = client.get(document["run"])
    num = check_certificate(document, run.status(), RunClaims.of(run.events()))
    signed = "" if key is None else f", and {key} has signed it"
    return f"{path}: the run has recorded these {counted(num, 'digest')}{signed}"


def _compared(run: Claim, again: Claim) -> str:
    if run.digest == again.digest:
        return f"{run.place}: {run.digest[:16]}, equal"
    return f"{run.place}: {run.digest} in the run, {again.digest} again"


def read_segments(text: str) -> set[int]:
    """Return the segment numbers that a text such as "3,7:9" names."""
    segments: set[int] = set()
    for part in text.split(","):
        first, colon, last = (bound.strip() for bound in part.partition(":"))
        if not first.isdecimal() or (colon and not last.isdecimal()):
            raise InvalidInputError.at("--segments", f"{text!r} is not such as 3,7:9")
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) <= MOST_SEGMENTS:
            many = f"{part!r} names none, or more than {MOST_SEGMENTS}"
            raise InvalidInputError.at("--segments", f"{many}; give first:last, such as 7:9")
        segments.update(numbers)
    return segments


def describe(result: Verification, seconds: float) -> Iterator[str]:
    """Yield the lines that explain the result of a verification to the user."""
    for reason in dict.fromkeys(result.unverified.values()):
        places = [place for place, why in result.unverified.items() if why == reason]
        yield f"not verified: {_some(places)}: {reason}"
    if result.difference is None:
        num = len(result.equal) + len(result.unverified)
        by = f" on {', '.join(result.workers)}" if result.workers else ""
        yield f"verified {len(result.equal)} of {counted(num, 'digest')}{by} in {seconds:.1f} s"
        run_workers = {worker for claim in result.equal for worker in claim.workers}
        if result.equal and run_workers.issuperset(result.workers):
            yield "these workers had computed the run: a defect that repeats would not show"
    else:
        yield from _of_difference(result.difference)
        reason = result.difference.why_open
        yield SENTENCES[result.conclusion] + (f": {reason}" if reason else "")
        if result.conclusion in (Conclusion.RUN, Conclusion.VERIFIER):
            yield _suspects(result.difference, result.conclusion)


def _suspects(difference: Difference, conclusion: Conclusion) -> str:
    """Return a sentence on which workers to suspect, and which other causes would look the same."""
    run, again = difference.claim, difference.again
    text = f"suspect {_by(run if conclusion is Conclusion.RUN else again)}"
    if set(run.workers) & set(again.workers):
        text += "; both had the same workers, so have other workers verify it before you decide"
    return f"{text}; code or data that have changed since the run look the same"


def _some(places: Iterable[object]) -> str:
    first, *others = places
    return f"{first} and {len(others)} more" if others else str(first)


def _of_difference(difference: Difference) -> Iterator[str]:
    run, again = difference.claim, difference.again
    yield f"first difference: {run.place}, by {_by(run)} in the run and {_by(again)} again"
    if difference.step is not None and difference.values is not None:
        mine, theirs = difference.values
        yield f"{difference.series} differs first at step {difference.step}: {mine!r}, {theirs!r}"
    if run.place.is_root_state:
        state = f"{difference.run_id} --which {again.segment}"
        yield f"the other state is kept: stratagem download {state}"
    else:
        yield f"the verifying run is kept: {difference.run_id}"


def _by(claim: Claim) -> str:
    return ", ".join(claim.workers) or "unknown workers"


def as_json(result: Verification) -> dict[str, Any]:
    """Return the result of a verification as plain JSON values."""
    difference = result.difference
    return {
        "run": result.run_id,
        "conclusion": result.conclusion,
        "equal": len(result.equal),
        "unverified": {str(place): reason for place, reason in result.unverified.items()},
        "workers": list(result.workers),
        "difference": None
        if difference is None
        else {
            "place": str(difference.claim.place),
            "digests": [difference.claim.digest, difference.again.digest],
            "workers": [list(difference.claim.workers), list(difference.again.workers)],
            "third": None if difference.third is None else difference.third.digest,
            "third_workers": [] if difference.third is None else list(difference.third.workers),
            "step": difference.step,
            "series": difference.series,
            "values": difference.values and [_json_number(value) for value in difference.values],
            "why_open": difference.why_open,
            "run": difference.run_id,
        },
    }


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def compare(
    run_id: RunArgument,
    other_id: Annotated[str, typer.Argument(metavar="OTHER", help="The other run.")],
    access: AccessOptions,
    bits: Annotated[
        bool, typer.Option("--bits", help="Find the first state and the first step that differ.")
    ] = False,
) -> None:
    """Show how two runs differ, with --bits to the bit.

    Only what the coordinator has recorded is read: the jobs, the digests of states and updates, and
    the history of steps. Exit codes: 0 nothing differs, 4 something does.
    """
    with access.client() as client:
        runs = [client.get(name) for name in (run_id, other_id)]
        lines = [
            f"{difference.key}: {difference.values[0]!r} and {difference.values[1]!r}"
            for difference in job_differences([dict(run.status().job) for run in runs])
        ]
        if bits:
            mine, theirs = [RunClaims.of(run.events()) for run in runs]
            differences = list(different_bits(mine, theirs, (run_id, other_id)))
            if not differences:
                print_line(make_console(), f"{counted(len(mine.by_place), 'digest')}, equal")
            lines += differences
            if first := first_step(*(run.history() for run in runs)):
                step, series, (one, other) = first
                lines.append(f"{series} differs first at step {step}: {one!r} and {other!r}")
    for line in lines or ["nothing differs"]:
        print_line(make_console(), line)
    if lines:
        raise typer.Exit(DIFFERS)


def different_bits(run: RunClaims, other: RunClaims, names: tuple[str, str]) -> Iterator[str]:
    """Yield the lines that explain which states and updates of two runs have other digests."""
    for name, mine, theirs in zip(names, (run, other), (other, run), strict=True):
        if alone := [place for place in mine.by_place if place not in theirs.by_place]:
            yield f"only in {name}: {_some(alone)}"
    pair = first_difference(run, other)
    if pair is None:
        return
    claim, again = pair
    common = [place for place in run.by_place if place in other.by_place]
    if (number := common.index(claim.place)) > 0:
        yield f"equal up to {common[number - 1]}"
    yield f"{claim.place}: {claim.digest} by {_by(claim)} and {again.digest} by {_by(again)}"
    if claim.numerics != again.numerics:
        yield f"numerics differ: {claim.numerics} and {again.numerics}"
