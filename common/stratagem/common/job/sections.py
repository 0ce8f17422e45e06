"""This module defines the sections of a job: the model, the data, the evaluation, and the initial
state.

Each section checks itself; `rules.py` has the rules that concern several sections. User code is
only named here (an entry point is text), never imported.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.ids import Digest, check_digest, check_run_id
from stratagem.common.job.fields import (
    RETURNED,
    Every,
    EveryField,
    Mode,
    OrderSpec,
    StopSpec,
    check_loss_kwargs,
    check_loss_name,
    check_metric_name,
)
from stratagem.common.job.schedules import ScheduleSpec
from stratagem.common.model.graph import GraphSpec
from stratagem.common.schema.document import (
    Count,
    EntrypointName,
    Items,
    Kwargs,
    MetricName,
    Name,
    NonEmptyText,
    Section,
    Share,
    Whole,
    one_of,
    only_with,
)
from stratagem.common.schema.json import FrozenDict
from stratagem.common.schema.rules import rule

# ---- Sections ----

MAX_METRICS: Final = 64
MAX_READERS: Final = 256
MAX_PREFETCH: Final = 64


class ModelSpec(Section):
    """The model: an entry point that builds it, or a graph.

    freeze: patterns of the names of parameters that are not trained, such as "encoder.*".
    """

    entrypoint: EntrypointName | None = None
    kwargs: Kwargs = FrozenDict()
    graph: GraphSpec | None = None
    freeze: Items[NonEmptyText] | None = None

    @rule
    def _one_source(self) -> Iterator[Violation]:
        yield from one_of(self, ("entrypoint", "graph"))
        yield from only_with(self, "kwargs", "entrypoint")


def check_tensor_file(value: str) -> str:
    """Return the path if its suffix is that of a safetensors file; else raise InvalidInputError."""
    if not value.endswith(".safetensors"):
        raise InvalidInputError(f"{value!r} is not a .safetensors file; other formats can run code")
    return value


class DataSpec(Section):
    """The data: an entry point, a file, an uploaded blob, or a name that each worker knows.

    collate: an entry point that makes a batch of a list of rows, for data sets that return single
    rows. readers: the number of processes per worker that fetch such rows; with 0 the computing
    thread fetches them. prefetch: the number of micro-batches that each reader reads ahead, by
    default 2. Neither changes the results. streams: the number of logical streams into which rows
    without indices (an iterable data set) are divided; a multiple of the number of replicas, which
    is the default. shuffle_rows: the size of the blocks in which such rows are shuffled.
    """

    entrypoint: EntrypointName | None = None
    kwargs: Kwargs = FrozenDict()
    collate: EntrypointName | None = None
    readers: Annotated[int, Field(ge=0, le=MAX_READERS)] | None = None
    prefetch: Annotated[int, Field(ge=1, le=MAX_PREFETCH)] | None = None
    order: OrderSpec | None = None
    streams: Count | None = None
    shuffle_rows: Count | None = None
    path: Annotated[str, AfterValidator(check_tensor_file)] | None = None
    inline: Annotated[Digest, AfterValidator(check_digest)] | None = None
    worker_local: Name | None = None

    @rule
    def _one_source(self) -> Iterable[Violation]:
        return one_of(self, ("entrypoint", "path", "inline", "worker_local"))

    @rule
    def _goes_together(self) -> Iterator[Violation]:
        yield from only_with(self, "prefetch", "readers")
        for name in ("kwargs", "collate", "readers", "streams", "shuffle_rows"):
            yield from only_with(self, name, "entrypoint")

    @property
    def is_stream(self) -> bool:
        """Return whether the job itself says that its training rows come as a stream."""
        return self.streams is not None or self.shuffle_rows is not None


class LossSpec(Section):
    """The loss: a built-in loss by name, or an entry point. Bare text is read as either.

    weight: over what the loss of `name: model` is a mean. By default `shifted_labels` for causal
    language models, else `labels` where they are integers, else `rows`.
    """

    name: (
        Annotated[Name, AfterValidator(check_loss_name), Field(examples=["cross_entropy"])] | None
    ) = None
    entrypoint: EntrypointName | None = None
    kwargs: Kwargs = FrozenDict()
    weight: Literal["rows", "labels", "shifted_labels"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, str):
            return {"entrypoint" if ":" in value else "name": value}
        return value

    @rule
    def _one_source(self) -> Iterator[Violation]:
        yield from one_of(self, ("name", "entrypoint"))
        if self.name is not None and ids.are_checked():
            yield from check_loss_kwargs(self.name, self.kwargs)
        if self.weight is not None and self.name != RETURNED:
            text = "belongs to the loss `model` only; a loss of your own may return (mean, weight)"
            yield Violation("weight", text)


def _not_too_many(metrics: object) -> object:
    """Raise InvalidInputError for a list with too many metrics, before each item is validated."""
    if isinstance(metrics, list) and len(metrics) > MAX_METRICS and ids.are_checked():
        raise InvalidInputError(
            f"has {len(metrics)} items; at most {MAX_METRICS} items are allowed"
        )
    return metrics


class EvaluationSpec(Section):
    """Settings of the evaluation: what is measured, on which split, how often, and what "best"
    means.

    every: by default 1 epoch; in a federated job, 1 round. of: "live" evaluates the parameters
    themselves, "average" their average. predictions: keep the model's outputs, in a job that only
    evaluates. keep: an entry point that turns a batch's (output, target) into the pair that is kept
    for the user's own metrics, which are computed once over the whole split. max_bytes: the limit
    on the size of these pairs, by default 1 GiB. best may name one value of such a metric,
    "module:metric.key". stop: early stopping.
    """

    split: Name = "test"
    every: EveryField = Every(1, "epoch")
    metrics: Annotated[
        Items[Annotated[MetricName, AfterValidator(check_metric_name)]],
        BeforeValidator(_not_too_many),
    ] = ()
    best: str | None = None
    mode: Literal["max", "min"] = "max"
    batch_size: Count = 256
    predictions: bool = False
    keep: EntrypointName | None = None
    max_bytes: Count | None = None
    stop: StopSpec | None = None
    of: Literal["live", "average"] | None = None

    @rule
    def _best_is_measured(self) -> Iterator[Violation]:
        for i, name in enumerate(self.metrics):
            if name in self.metrics[:i]:
                yield Violation(f"metrics[{i}]", f"{name!r} is in the list already")
        if self.best is not None and (problem := self.why_not_measured(self.best)):
            yield Violation("best", problem)

    @rule
    def _of_own_metrics(self) -> Iterator[Violation]:
        if not any(":" in name for name in self.metrics):
            for name in ("keep", "max_bytes"):
                if getattr(self, name) is not None:
                    text = "is for metrics of your own; evaluation.metrics names none"
                    yield Violation(name, text)

    def why_not_measured(self, metric: str) -> str:
        """Return the error message if no evaluation measures this metric; "" if one does."""
        if metric in (*self.metrics, "loss"):
            return ""
        function = next((n for n in self.metrics if ":" in n and metric.startswith(f"{n}.")), None)
        if function is None:
            names = ", ".join(dict.fromkeys((*self.metrics, "loss")))
            return f"{metric!r} is not measured; one of {names}"
        if any(key.isdecimal() for key in metric.removeprefix(function).split(".")):
            return f"{metric!r} is an entry of a vector; a mapping gives its values names"
        return ""


@dataclass(frozen=True, slots=True)
class FollowedMetric:
    """The name of a metric in commits, and which changes of it count as an improvement."""

    name: str
    mode: Mode
    min_delta: float


def stop_metric(evaluation: EvaluationSpec, spec: StopSpec) -> FollowedMetric:
    """Return the metric that early stopping follows, in a job that was checked."""
    return _followed(evaluation, spec.metric, spec.mode, spec.min_delta)


def plateau_metric(evaluation: EvaluationSpec, spec: ScheduleSpec) -> FollowedMetric:
    """Return the metric that the plateau schedule follows, in a job that was checked."""
    return _followed(evaluation, spec.metric, spec.mode, spec.min_delta or 0.0)


def _followed(
    evaluation: EvaluationSpec, metric: str | None, mode: Mode | None, min_delta: float
) -> FollowedMetric:
    name = metric or evaluation.best
    assert name is not None  # the job was checked
    return FollowedMetric(f"{evaluation.split}.{name}", mode or evaluation.mode, min_delta)


class CheckpointSpec(Section):
    """The interval at which the state is committed; by default the strategy decides."""

    every: EveryField | None = None


class RecordingSpec(Section):
    """Settings of the step history of a run, which do not change the results.

    steps: record each step, which costs some microseconds per step. observed: also record values
    that depend on clocks and machines, such as rows per second. client_steps: also record the steps
    of each client of a federation, which costs a row of the journal's database for each update.
    """

    steps: bool = True
    observed: bool = True
    client_steps: bool = False


class VerificationSpec(Section):
    """Settings of the verification of a run while it trains: other workers compute some of its
    segments again, with the same numerics, and the training does not wait for them.

    sample: the fraction of the segments that are computed again; the job's seed draws them. on:
    which workers compute them: "spare", workers on which nothing else trains; "any", all workers
    that did not compute the segment; "members", workers that train this run. If a state differs, a
    third execution decides. A run that was wrong goes back to the state before that segment, and
    workers that compute it wrongly are quarantined.
    """

    sample: Share
    on: Literal["spare", "any", "members"] = "spare"


class PartitionSpec(Section):
    """Settings of how one data set is divided among federated clients.

    alpha: the concentration of the Dirichlet distribution; a small one skews the parts.
    labels_per_client: the number of labels per client, for by_label. client and num_clients: the
    only part on which this job trains, for a job that reproduces one client of a federated job.
    seed: the seed of the division; by default that of the job.
    """

    method: Literal["contiguous", "by_label", "dirichlet"]
    alpha: Annotated[float, Field(gt=0)] = 0.5
    labels_per_client: Count | None = None
    client: Whole | None = None
    num_clients: Count | None = None
    seed: Whole | None = None

    @rule
    def _settings_fit_the_method(self) -> Iterator[Violation]:
        if self.method != "by_label" and self.labels_per_client is not None:
            yield Violation("labels_per_client", "belongs to method by_label only")
        if self.method != "dirichlet" and self.alpha != PartitionSpec.model_fields["alpha"].default:
            yield Violation("alpha", "belongs to method dirichlet only")

    @rule
    def _one_of_several(self) -> Iterator[Violation]:
        if (self.client is None) != (self.num_clients is None):
            yield Violation("client", "goes together with num_clients")
        elif self.client is not None and self.client >= (self.num_clients or 0):
            text = f"{self.client} must be below num_clients, {self.num_clients}"
            yield Violation("client", text)


# ---- Initial state ----
#
# A run's weights come from a stored state, unless they are drawn from the seed.
#
# A digest names the stored state. A person may name an earlier run or a file instead; the client
# turns it into that digest before the job is submitted. The job thus records the start of the
# run, whatever happens to the run or the file later.


def _check_which(value: str) -> str:
    if value not in ("final", "best") and not re.fullmatch("[0-9]{1,18}", value):
        raise InvalidInputError(f"{value!r} is not final, best or the number of a segment")
    return value


def _check_numbers(value: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InvalidInputError(f"{name} is {number!r}, not a number")
    return value


class InitialSpec(Section):
    """The state with which a run begins: a stored state by its digest, a commit of a run, or a
    safetensors file on the client's machine. The client replaces the latter two by the digest.

    which: the commit of the run, as in `stratagem download`: final, best or the number of a
    segment. trained_with: the hyperparameters of the population's member that trained the state,
    for the error message if the state does not fit this job; the client fills them in. resume:
    continue from the step of the commit, with its optimizer and its schedule; otherwise the
    optimizer is new and steps count from 0. step, metrics, average: those of the commit, which the
    client fills in.
    """

    digest: (
        Annotated[Digest, AfterValidator(check_digest), Field(examples=["0123456789abcdef" * 4])]
        | None
    ) = None
    run: Annotated[str, AfterValidator(check_run_id)] | None = None
    which: Annotated[str, AfterValidator(_check_which)] | None = None
    file: Annotated[str, AfterValidator(check_tensor_file)] | None = None
    trained_with: Kwargs | None = None
    resume: Literal[True] | None = None
    step: Whole | None = None
    metrics: Annotated[Kwargs, AfterValidator(_check_numbers)] | None = None
    average: Annotated[Digest, AfterValidator(check_digest)] | None = None

    @rule
    def _one_source(self) -> Iterator[Violation]:
        yield from one_of(self, ("digest", "run", "file"))
        yield from only_with(self, "which", "run")
        yield from only_with(self, "trained_with", "digest")

    @rule
    def _wrong_to_resume(self) -> Iterator[Violation]:
        if self.resume is not None and self.file is not None:
            yield Violation("resume", "is not possible from a file, only from a run")
        if self.resume is not None and self.digest is not None and self.step is None:
            yield Violation("step", "missing; the steps behind the state that is resumed")
        for name in ("step", "metrics", "average"):
            if getattr(self, name) is not None and (self.resume is None or self.digest is None):
                yield Violation(name, "has a meaning only together with digest and resume")
