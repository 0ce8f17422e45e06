"""Limit the messages of a plan that leave a site to the numbers that its rule allows.

The module defines the forms in which progress, results and errors leave; none contains data of the
site's rows. The withheld parts are in the site's log.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from stratagem.common.base.errors import (
    RefusedBySiteError,
    StratagemError,
    UnfitModelError,
    UserCodeError,
    leaves,
)
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.user_code import bundles

# ---- Place of an error ----
#
# The place of an error in the job's code is given in a form that no row can influence. Only files
# of the job's modules are named: those of its bundle, or of a package of its entry points. A type
# is named only where its module has it under its name, else its nearest such base, since code may
# make types, and files, with any name.

MAX_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class CodePlaces:
    """A job's code: its bundle's digest ("" without one), and the packages it names."""

    bundle: str
    packages: frozenset[str]


def told_type(error: BaseException) -> str:
    """Return the name of an error's type; for a UserCodeError, of the original type."""
    for kind in type(leaves(error)[0]).__mro__:
        resolved: object = sys.modules.get(kind.__module__)
        for part in kind.__qualname__.split("."):
            resolved = getattr(resolved, part, None)
        name = f"{bundles.plain_name(kind.__module__)}.{kind.__qualname__}"
        if resolved is kind and len(name) <= MAX_CHARS:
            return name.removeprefix("builtins.")
    return "Exception"


def told_place(error: BaseException, places: CodePlaces) -> str:
    """Return "file.py, line 7" of the innermost frame in the job's code; "" if there is none."""
    trace: TracebackType | None = leaves(error)[0].__traceback__
    place = ""
    while trace is not None:
        file = _own_file(trace.tb_frame.f_code.co_filename, places)
        if file:
            place = f"{file}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _own_file(filename: str, places: CodePlaces) -> str:
    folder = os.environ.get(bundles.FOLDER_VARIABLE)
    if folder and places.bundle:
        root = Path(folder, places.bundle)
        if Path(filename).is_relative_to(root) and Path(filename).is_file():
            return bundles.plain_path(filename)[:MAX_CHARS]
    for package in places.packages:
        module = sys.modules.get(package)
        for home in _homes(module):
            if filename == home or (os.path.isdir(home) and _is_below(filename, home)):
                return os.path.relpath(filename, os.path.dirname(home))[:MAX_CHARS]
    return ""


def _homes(module: object) -> list[str]:
    """Return the paths of a module's code: its file, or its folders if it is a package."""
    folders = getattr(module, "__path__", None)
    if folders is not None:
        return [str(folder) for folder in folders]
    file = getattr(module, "__file__", None)
    return [file] if file else []


def _is_below(filename: str, folder: str) -> bool:
    return Path(filename).is_relative_to(folder) and Path(filename).is_file()


# ---- Disclosure of a plan ----

OWN_METRICS: Final = frozenset({"max_grad_norm", "skipped_steps"})
"""Metrics of a client's round that Stratagem defines; all others are the job's."""
LOSS: Final = "loss"
WEIGHT: Final = "weight:"
ALWAYS: Final = (RefusedBySiteError,)
"""Errors whose messages contain only parts of the job and of the site's file."""


@dataclass(frozen=True, slots=True)
class Disclosure:
    """The rules by which a site discloses parts of one plan's messages."""

    site: str
    metrics: frozenset[str]
    """The disclosed metrics of evaluations, besides the loss."""
    tells_loss: bool
    """True to disclose loss and metrics at all."""
    shares_logs: bool
    shares_messages: bool
    """True to disclose the messages of errors."""

    def progress(self, progress: pb.Progress) -> pb.Progress:
        """Return the plan's progress without the loss, which may be that of a single row."""
        return pb.Progress(step=progress.step, to_step=progress.to_step)

    def stall(self, stall: pb.Stall, activity: str) -> pb.Stall:
        """Return the stall report with a general name of the activity; row and line are only in the
        site's log."""
        is_over = not stall.seconds
        return pb.Stall(
            seconds=stall.seconds, activity="" if is_over else activity, awaits=stall.awaits
        )

    def result(self, result: pb.ExecuteResult) -> pb.ExecuteResult:
        """Return the result without the parts that the site withholds."""
        match result.WhichOneof("outcome"):
            case "client_round":
                return pb.ExecuteResult(client_round=self._round(result.client_round))
            case "evaluate":
                disclosed = pb.EvaluateResult(parts=self._parts(result.evaluate))
                if (metrics := self._own_metrics(result.evaluate.own_metrics)).metrics:
                    disclosed.own_metrics.CopyFrom(metrics)
                return pb.ExecuteResult(evaluate=disclosed)
            case "measure_sums":
                return pb.ExecuteResult(measure_sums=self._own_metrics(result.measure_sums))
            case "build" | "error" | "interrupted":
                return result
            case other:
                raise RefusedBySiteError(f"site {self.site} tells nothing of a plan {other}")

    def _round(self, done: pb.ClientRoundResult) -> pb.ClientRoundResult:
        names = OWN_METRICS & set(done.metrics) if self.tells_loss else set()
        has_loss_before = done.HasField("loss_before")
        has_num_applied = done.HasField("num_applied_steps")
        return pb.ClientRoundResult(
            spent=done.spent if done.HasField("spent") else None,
            num_samples=done.num_samples,
            loss=done.loss if self.tells_loss else 0.0,
            is_loss_withheld=done.is_loss_withheld or not self.tells_loss,
            seconds=done.seconds,
            num_steps=done.num_steps,
            metrics={name: done.metrics[name] for name in sorted(names)},
            traffic=done.traffic,
            loss_before=done.loss_before if self.tells_loss and has_loss_before else None,
            num_applied_steps=done.num_applied_steps if has_num_applied else None,
            state_digest=done.state_digest,
            state_lost=done.state_lost,
        )

    def _parts(self, done: pb.EvaluateResult) -> list[pb.EvaluationPart]:
        """Return one part per split: the sums over all its batches, since a batch may have a single
        row.

        They are added in order, as at the coordinator.
        """
        whole: dict[str, pb.EvaluationPart] = {}
        for part in sorted(done.parts, key=lambda part: (part.split, part.batch)):
            total = whole.setdefault(part.split, pb.EvaluationPart(split=part.split))
            total.weight += part.weight
            for name, value in part.sums.items():
                if name.removeprefix(WEIGHT) in self.metrics | {LOSS}:
                    total.sums[name] += value
        return list(whole.values()) if self.tells_loss else []

    def _own_metrics(self, done: pb.OwnMetrics) -> pb.OwnMetrics:
        """Return the user's own metrics that the rule allows, and their states: "<split>.<metric>",
        or "<split>.<metric>.<key>" if a metric has several values."""
        disclosed = pb.OwnMetrics(are_measured=True)
        if self.tells_loss:
            disclosed.metrics.update(
                {name: value for name, value in done.metrics.items() if self._is_allowed(name)}
            )
            disclosed.sums.extend(state for state in done.sums if self._is_allowed(state.metric))
            disclosed.unmerged.update(
                {name: kind for name, kind in done.unmerged.items() if self._is_allowed(name)}
            )
        return disclosed

    def _is_allowed(self, name: str) -> bool:
        """Return whether the rule allows this metric, or the metric that this is a value of."""
        metric = name.partition(".")[2]
        return any(f"{metric}.".startswith(f"{allowed}.") for allowed in self.metrics)

    def error(self, error: BaseException, places: CodePlaces, activity: str) -> UserCodeError:
        """Return the disclosed part of an error: its type, and its line in the job's code.

        The error that a job does not fit its model is disclosed in full, unless the job's code
        raised it.
        """
        cause = error.__cause__ if isinstance(error, UserCodeError) else error
        if isinstance(cause, ALWAYS):
            return UserCodeError(type(cause).__name__, str(cause), activity=activity)
        kind = told_type(cause or error)
        place = told_place(cause or error, places)
        if isinstance(cause, UnfitModelError) and not place:
            return UserCodeError(type(cause).__name__, str(cause), activity=activity)
        where = f" at {place}" if place else ""
        if self.shares_messages:
            text = error.message if isinstance(error, UserCodeError) else str(error)
            return UserCodeError(kind, f"{kind}{where}: {text}", activity=activity)
        message = f"{kind}{where}; site {self.site} keeps the message in its own log"
        return UserCodeError(kind, message, activity=activity)

    def failure(self, failure: BaseException) -> BaseException:
        """Return an error of the same kind without the message, which may come from other
        libraries."""
        if not isinstance(failure, StratagemError) or isinstance(failure, ALWAYS):
            return failure
        return type(failure)(f"site {self.site} keeps the message in its own log")
