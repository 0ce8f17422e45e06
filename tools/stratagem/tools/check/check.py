"""Check a job before it is submitted, and collect findings; errors raised by a check become
findings, too."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import nn

from stratagem.common.base.errors import InvalidInputError, StratagemError, UserCodeError
from stratagem.common.job import JobSpec, entry_points_by_field
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.strategy import Federated, partitions_state
from stratagem.common.tensors.files import read_header
from stratagem.tools.check.tried_step import (
    TriedStep,
    head_of,
    local_steps,
    spread_over,
    try_divided_steps,
    try_evaluation,
    try_rows_twice,
    try_step,
)
from stratagem.tools.memory.play import Site
from stratagem.worker.data.checks import check_same_rows, described_rows
from stratagem.worker.data.datasets import Dataset, Gather, training_split
from stratagem.worker.data.order import BatchOrder, epoch_rows_of
from stratagem.worker.data.rows import RowDataset
from stratagem.worker.data.sources import load_data
from stratagem.worker.data.streams import FetchedRows, StreamDataset
from stratagem.worker.engine.state_format import conversions_of
from stratagem.worker.federated.row_privacy import check_rows_apart
from stratagem.worker.models.build import build_model, build_shapes
from stratagem.worker.models.tensors import converted_dtype, rows_dtype
from stratagem.worker.plans.build import check_built, check_supported
from stratagem.worker.user_code.call_notes import text_of

# ---- Report ----

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings about one job, in the order in which checks made them."""

    say: Callable[[Finding], None] = lambda _: None
    """A function that receives each finding as soon as it is made."""
    findings: list[Finding] = field(default_factory=list)

    def ok(self, check: str, about: str, found: str) -> None:
        """Add a finding that something is in order."""
        self._add(Finding(check, about, Level.OK, found))

    def warn(self, check: str, about: str, found: str, advice: str = "") -> None:
        """Add a warning: something may be wrong, or could not be checked."""
        self._add(Finding(check, about, Level.WARN, found, advice))

    def fail(self, check: str, about: str, found: str, advice: str = "") -> None:
        """Add a fault, because of which the job would be refused or fail; the same fault is added
        only once."""
        said = {(known.about, known.found) for known in self.findings if known.level is Level.FAIL}
        if (about, found) not in said:
            self._add(Finding(check, about, Level.FAIL, found, advice))

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.say(finding)

    def has_failed(self, text: str) -> bool:
        """Return True if the sentence of a fault added so far is part of this text."""
        return any(each.level is Level.FAIL and each.found in text for each in self.findings)

    def attempt(self, check: str, about: str, action: Callable[[], T]) -> T | None:
        """Run the check `action` and return its result; if it raises, add the errors as faults and
        return None. about: the field to name for errors that name none."""
        try:
            return action()
        except UserCodeError as error:
            self.fail(check, about, f"{error.type}: {error.message}", _place_of(error))
        except InvalidInputError as error:
            for violation in error.violations:
                self.fail(check, violation.field or about, violation.message)
            if not error.violations:
                self.fail(check, about, str(error))
        except StratagemError as error:
            self.fail(check, about, str(error))
        except RuntimeError as error:  # raised by torch, called by our code
            self.fail(check, about, f"{type(error).__name__}: {error}")
        return None


def _place_of(error: UserCodeError) -> str:
    """Return the activity and the stack frames of an error in user code, without its message."""
    lines = error.traceback.rstrip().splitlines()
    while lines and not lines[-1].startswith("  "):
        del lines[-1]
    frames = [line for line in lines if not line.startswith("Traceback")]
    return "\n".join([f"{error.activity}, at" if frames else error.activity, *frames])


# ---- Checks of a job ----
#
# A little of each part of the job is tried as workers would use it: code, model, data, a step,
# metrics. Every possible check is made, whatever the others find, without the network.

_DIVIDED: Final = "strategy.options.partition_state"
_NUM_ROWS: Final = 2
_TRIED_ROWS: Final = 9
"""The number of rows tried in each split: the first, the last, and some in between."""
_STREAMED_ROWS: Final = 64
_STREAMED_TWICE: Final = 3
_SAME: Final = 0.01
"""The tolerance with which a loss counts as doubled: models with random numbers treat rows
unequally."""
_NUM_NAMES: Final = 5
"""The largest number of names listed in a finding."""


def check_job(
    job: JobSpec,
    site: Site,
    memory: Callable[[], str],
    say: Callable[[Finding], None] = lambda _: None,
) -> list[Finding]:
    """Check a job whose document is valid, and return the findings; faults have the level FAIL.

    memory: a function that returns a sentence on the needed memory, or raises. say: receives each
    finding at once.
    """
    checks = _JobChecks(job, site, CheckReport(say))
    checks.code()
    placed = job.execution.with_changes(parallelism="None")  # it has become a strategy already
    checks.report.attempt("settings", "execution", lambda: check_supported(placed))
    model = checks.model()
    data = checks.data(model)
    if model is None or not data:
        failed = [*(["the model"] if model is None else []), *([] if data else ["the data"])]
        reason = f"needs {' and '.join(failed)}, which failed"
        checks.report.warn("step", "", f"not tried: {reason}")
        return checks.report.findings
    checks.together(model, data)
    if "train" not in data and not job.only_evaluates:
        checks.report.warn("step", "", "not tried: needs rows to train on")
        return checks.report.findings
    tried = checks.step(data)
    if tried is not None:
        checks.divided(data)
        checks.evaluation(tried)
        checks.memory(memory)
    else:
        checks.report.warn("memory", "", "not estimated: needs a step, which failed")
    return checks.report.findings


@dataclass(frozen=True, slots=True)
class _JobChecks:
    job: JobSpec
    site: Site
    report: CheckReport

    def code(self) -> None:
        """Check that every entry point can be imported and called."""
        named, resolve = entry_points_by_field(self.job), self.site.entrypoints.resolve
        found = [
            self.report.attempt("code", field, lambda: callable(resolve(name, field)))  # noqa: B023
            for field, name in named.items()
        ]
        if named and all(found):
            self.report.ok("code", "", f"{len(named)} entry points can be imported")

    def model(self) -> nn.Module | None:
        """Check that the model can be built, on the meta device and for real; return the model."""
        job, entrypoints, changes = self.job, self.site.entrypoints, list[str]()
        if self.report.attempt("model", "model", self._build_shapes) is None:
            return None
        model = self.report.attempt(
            "model",
            "model",
            lambda: build_model(
                job, entrypoints, device=self.site.device, fresh=True, say=changes.append
            ),
        )
        if model is not None:
            sizes = [param.numel() for param in model.parameters()]
            trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
            found = f"{type(model).__name__}, {sum(sizes):,} parameters in {len(sizes)} tensors"
            if trained != sum(sizes):
                found += f", {trained:,} of them trained"
            self.report.ok("model", "model", found)
            self._initial(model)
        for sentence in changes:
            self.report.ok("model", "execution.precision", sentence)
        return model

    def _initial(self, model: nn.Module) -> None:
        """Check that the job's initial state file exists, and report conversions of its dtypes."""
        if self.job.initial is None or (file := self.job.initial.file) is None:
            return
        given = self.report.attempt("model", "initial.file", lambda: _dtypes_in(Path(file)))
        if given is None:
            return
        if converted := conversions_of(given, model):
            self.report.warn("model", "initial.file", converted)

    def _build_shapes(self) -> nn.Module:
        meta = torch.device("meta")
        return build_shapes(self.job, self.site.entrypoints, device=meta)

    def data(self, model: nn.Module | None) -> dict[str, Dataset]:
        """Check that each split can be loaded, its rows read twice and collated to batches; return
        the data. model: determines the dtype of rows, if there is one."""
        dtype = converted_dtype(self.job) if model is None else rows_dtype(self.job, model)
        data = {split: self._first_rows(split, each) for split, each in self._loaded().items()}
        if data and not self.job.only_evaluates:
            self.report.attempt("data", "data", lambda: training_split(data))
        for split, dataset in data.items():
            if len(dataset):
                reads = partial(self._batch, split, dataset, dtype)
                self.report.attempt("data", f"data.{split}", reads)
            else:
                self.report.warn("data", f"data.{split}", "has no rows")
        return data

    def _loaded(self) -> dict[str, Dataset]:
        """Return the job's data; check that the function gives equal rows when called twice."""
        job, site = self.job, self.site
        first_call = self.report.attempt(
            "data",
            "data",
            lambda: described_rows(
                job, _few_of(load_data(job, site.entrypoints, site.sources), _STREAMED_TWICE)
            ),
        )
        if first_call is None:
            return {}
        data = self.report.attempt("data", "data", lambda: site.data_of(job)) or {}
        few, where = _few_of(data, _STREAMED_TWICE), "when data.entrypoint is called again"
        self.report.attempt("data", "data", lambda: check_same_rows(job, few, first_call, where))
        return data

    def _first_rows(self, split: str, dataset: Dataset) -> Dataset:
        """Return the first rows of a data set that is a stream; any other data set as it is."""
        if not isinstance(dataset, StreamDataset):
            return dataset
        how = "its states lead on" if dataset.has_states else "a shard is read again to go on"
        found = f"a stream of {dataset.source.num_shards} shards; {how}"
        self.report.ok("data", f"data.{split}", found)
        return dataset.head(_STREAMED_ROWS)

    def _batch(self, split: str, dataset: Dataset, dtype: torch.dtype | None) -> None:
        gather = Gather(dtype, self.site.device)
        few = spread_over(dataset, _TRIED_ROWS)
        for place in range(len(few)):
            gather(few, torch.tensor([place]), f"reading {split}")
        rows = min(_NUM_ROWS, len(dataset))
        x, y = gather(head_of(dataset, rows), torch.arange(rows), f"reading {split}")
        is_read_alone = isinstance(dataset, RowDataset | FetchedRows)
        how = "fetched one by one" if is_read_alone else "read as slices"
        batch = text_of(x) if y is None or y is x else f"({text_of(x)}, {text_of(y)})"
        found = f"{len(dataset):,} rows, {how}; a batch of {rows}: {batch}"
        self.report.ok("data", f"data.{split}", found)

    def together(self, model: nn.Module, data: Mapping[str, Dataset]) -> None:
        """Check that the model and the data fit together, and fit the rest of the job."""
        num_rows = {split: len(dataset) for split, dataset in data.items()}
        self.report.attempt("model", "strategy", lambda: check_built(self.job, model, num_rows))
        self.report.attempt("model", "model", lambda: check_rows_apart(self.job, model))
        if "train" not in data or self.job.only_evaluates:
            return
        steps = self.report.attempt("order", "data.order", lambda: self._steps_of(data))
        if isinstance(data["train"], FetchedRows):
            return
        if steps is not None and isinstance(self.job.strategy, Federated):
            found = local_steps(self.job, self.job.strategy, self.site, len(data["train"]))
            self.report.ok("order", "data.partition", found)
        elif steps is not None:
            total = self.job.steps or (self.job.epochs or 0) * steps
            in_all = f", {total:,} in all" if total else ""  # federations count rounds
            self.report.ok("order", "data.order", f"{steps:,} steps to an epoch{in_all}")

    def _steps_of(self, data: Mapping[str, Dataset]) -> int:
        order = epoch_rows_of(self.job, data, self.site.entrypoints)
        num_rows = len(data["train"])
        return BatchOrder(num_rows, self.job.batch_size, self.job.seed, order).steps_per_epoch

    def step(self, data: Mapping[str, Dataset]) -> TriedStep | None:
        """Check one training step: that it runs, is finite, reaches all parameters, and gives the
        same bits again from a saved state."""
        tried = self.report.attempt("step", "loss", lambda: try_step(self.job, self.site, data))
        for note in [] if tried is None else tried.setup.notes:
            self.report.warn("settings", "", note)
        if tried is None or tried.report is None:
            return tried
        if tried.report.num_skipped:
            found = f"the gradient over {tried.num_rows} rows is not finite: the step is skipped"
            advice = "in float16 the scale of the loss comes down in the first steps; else see why"
            self.report.warn("step", "loss", found, advice)
        else:
            found = f"loss {tried.report.loss:.6g} over {tried.num_rows} rows; gradient norm "
            self.report.ok("step", "loss", f"{found}{tried.report.grad_norm:.3g}")
            self._mean(data)
        if tried.untouched:
            listed = ", ".join(tried.untouched[:_NUM_NAMES])
            more = len(tried.untouched) - _NUM_NAMES
            found = f"{listed}{f' and {more} more' if more > 0 else ''} got no gradient"
            advice = "freeze them with model.freeze if that is meant"
            self.report.warn("step", "model", found, advice)
        if tried.resumes:
            self.report.ok("resume", "", "a step from a saved state has the same bits")
        elif self.job.execution.deterministic:
            found = "a step from a saved state has other bits than the step it repeats"
            advice = (
                "the model, the loss or the rows keep something that is in no state_dict, or draw "
                "from a generator of their own; execution.deterministic: false allows it"
            )
            self.report.fail("resume", "", found, advice)
        return tried

    def _mean(self, data: Mapping[str, Dataset]) -> None:
        """Check that the user's loss is a mean over rows, by a batch that has each row twice."""
        field = "step" if self.job.step is not None else "loss"
        own = self.job.step or (self.job.loss and self.job.loss.entrypoint)
        if not own or isinstance(data["train"], FetchedRows):
            return
        tried = partial(try_rows_twice, self.job, self.site, data)
        twice = self.report.attempt("step", field, tried)
        if twice is not None and abs(twice - 2) < _SAME:
            found = f"{own} is twice as large for each row twice: a sum over rows, not their mean"
            advice = "return the mean, or (mean, weight); see docs/how-to/training-step.md"
            self.report.warn("step", field, found, advice)

    def divided(self, data: Mapping[str, Dataset]) -> None:
        """Try two steps with a state divided among workers, if the job divides its state."""
        if self.job.only_evaluates or not partitions_state(self.job.strategy):
            return
        tried = partial(_is_divided, self.job, self.site, data)
        if self.report.attempt("step", _DIVIDED, tried):
            self.report.ok("step", _DIVIDED, "two steps of a worker that keeps only its slice")

    def evaluation(self, tried: TriedStep) -> None:
        """Check that the loss and the metrics of an evaluation can be computed."""
        spec = self.job.evaluation
        if spec is None or spec.split not in tried.setup.data:
            return
        split = spec.split
        found = self.report.attempt(
            "evaluation", "evaluation", lambda: try_evaluation(tried, split)
        )
        if found is not None:
            values = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            num_rows = len(tried.setup.data[split])
            self.report.ok("evaluation", "evaluation", f"over {num_rows} rows: {values}")

    def memory(self, needed: Callable[[], str]) -> None:
        """Report the memory that a worker needs, or that no estimate is possible."""
        try:
            self.report.ok("memory", "", needed())
        except StratagemError as error:
            first, *_ = str(error).splitlines()
            why = "needs what has failed above" if self.report.has_failed(first) else first
            self.report.warn("memory", "", f"cannot be estimated: {why}")


def _dtypes_in(path: Path) -> dict[str, str]:
    """Return the dtype of each tensor in a file, keyed by name."""
    try:
        manifest, _ = read_header(path)
    except OSError as error:
        raise InvalidInputError.at("initial.file", f"{path}: {error.strerror}") from error
    return {spec.name: spec.dtype for spec in manifest.tensors}


def _is_divided(job: JobSpec, site: Site, data: Mapping[str, Dataset]) -> bool:
    try_divided_steps(job, site, data)
    return True


def _few_of(data: Mapping[str, Dataset], num_rows: int) -> dict[str, Dataset]:
    """Return the data sets by split, with each stream replaced by its first num_rows rows."""
    return {
        split: each.head(num_rows) if isinstance(each, StreamDataset) else each
        for split, each in data.items()
    }
