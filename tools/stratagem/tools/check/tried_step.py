"""Make one real training step and one evaluation of a job on a few rows, in this process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from stratagem.common.job import JobSpec
from stratagem.common.numerics.shards import split_rows
from stratagem.common.strategy import Federated, Local, partitions_parameters
from stratagem.tools.memory.play import Site
from stratagem.worker.data.datasets import Dataset, Subset
from stratagem.worker.data.sources import ClientData
from stratagem.worker.engine.buffers import constant_buffers
from stratagem.worker.engine.build import make_setup
from stratagem.worker.engine.reports import StepReport
from stratagem.worker.engine.round_trip import check_optimizer_of
from stratagem.worker.engine.setup import Setup
from stratagem.worker.engine.slices import StateShare
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.exchange import sliced_exchange
from stratagem.worker.exchange.layout import ShardOwners
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.models.build import build_model
from stratagem.worker.numerics.model import make_gather
from stratagem.worker.objectives.evaluator import EvaluationShare

# ---- Tried step ----

_NUM_ROWS: Final = 2
"""The number of rows in the tried step."""
_EVALUATED_ROWS: Final = 64
"""The number of rows evaluated, spread over the split, for metrics that need several classes."""
_EVALUATED_BATCH: Final = 32
_ALONE: Final = ShardOwners(0, 1, 1)


@dataclass(frozen=True, slots=True)
class TriedStep:
    """The result of a tried training step: its report, and further observations."""

    setup: Setup
    num_rows: int
    report: StepReport | None
    """The training step's report; None if the job trains nothing."""
    untouched: tuple[str, ...] = ()
    """The names of trained parameters that got no gradient."""
    resumes: bool = True
    """True if the next step gives the same bits after the state was saved and loaded."""


def try_step(job: JobSpec, site: Site, data: Mapping[str, Dataset]) -> TriedStep:
    """Make one step of the job, as a single worker would, on the first and the last row. Raises
    whatever training raises."""
    few, num_rows = _few_of(data)
    short = _shortened(job, max(num_rows, 1))
    if job.only_evaluates:
        return TriedStep(_setup(short, site, few, fresh=True), 0, None)
    trainer = Trainer(_setup(short, site, few, fresh=True))
    touched: set[str] = set()
    hooks = [
        param.register_post_accumulate_grad_hook(lambda _, name=name: touched.add(name))
        for name, param in trainer.params
    ]
    exchange = _exchange(trainer)
    report = trainer.train_step(exchange, range(1), 1)
    for hook in hooks:
        hook.remove()
    saved = trainer.copy_state()
    trainer.train_step(exchange, range(1), 1)
    again = Trainer(_setup(short, site, few, fresh=False))
    again.load_state(*saved)
    again.train_step(_exchange(again), range(1), 1)
    return TriedStep(
        trainer.setup,
        num_rows,
        report,
        tuple(name for name, _ in trainer.params if name not in touched),
        again.fingerprint() == trainer.fingerprint(),
    )


def try_rows_twice(job: JobSpec, site: Site, data: Mapping[str, Dataset]) -> float:
    """Return the factor by which a first step's loss grows if each row is there twice."""
    few, num_rows = _few_of(data)
    once, twice = (
        _first_loss(job, site, {**few, "train": Subset(few["train"], rows)})
        for rows in (torch.arange(num_rows), torch.arange(num_rows).repeat(2))
    )
    return twice / once if once else 1.0


def _first_loss(job: JobSpec, site: Site, data: Mapping[str, Dataset]) -> float:
    """Return the loss of the job's first step, over all rows of the training split."""
    trainer = Trainer(_setup(_shortened(job, len(data["train"])), site, data, fresh=True))
    return trainer.train_step(_exchange(trainer), range(1), 1).loss


def try_divided_steps(job: JobSpec, site: Site, data: Mapping[str, Dataset]) -> None:
    """Make two steps, a copy of the state and an evaluation as a worker does that holds only a
    slice of the state: parameters are absent while no layer uses them.

    The second step detects anything that code has kept from the first. Raises whatever training
    raises.
    """
    few, num_rows = _few_of(data)
    short = _shortened(job, num_rows).altered(strategy=job.strategy)
    share = StateShare(0, 1, is_full=partitions_parameters(job.strategy))
    trainer = Trainer(_setup(short, site, few, fresh=True), share)
    assert trainer.pieces is not None
    exchange = sliced_exchange(
        trainer.buckets, None, 1, trainer.pieces.owners, held=trainer.pieces.held
    )
    trainer.connect(exchange)
    try:
        for _ in range(2):
            trainer.train_step(exchange, range(1), 1)
        trainer.copy_state()
        if job.evaluation is not None and len(few.get(job.evaluation.split, ())):
            trainer.evaluate(EvaluationShare([job.evaluation.split], 0, 1, lambda *_: None, {}))
    finally:
        exchange.close()


def try_evaluation(tried: TriedStep, split: str) -> dict[str, float]:
    """Return the loss and the metrics over a few rows of a split."""
    evaluator = tried.setup.evaluator
    evaluator.model.eval()
    share = EvaluationShare([split], 0, 1, lambda *_: None, {})
    with constant_buffers(evaluator.model):
        parts = evaluator.parts_of(share)
    names = dict.fromkeys(name for part in parts for name in part.sums if ":" not in name)
    found = {}
    for name in names:
        weights = [part.sums.get(f"weight:{name}", part.weight) for part in parts]
        found[name] = sum(part.sums[name] for part in parts) / (sum(weights) or 1.0)
    if evaluator.own is not None:
        kept = [part.kept for part in parts if part.kept is not None]
        found |= evaluator.own.measured(split, kept)
    return found


def head_of(dataset: Dataset, num_rows: int) -> Dataset:
    """Return the first num_rows rows of a data set."""
    return Subset(dataset, torch.arange(min(num_rows, len(dataset))))


def spread_over(dataset: Dataset, num_rows: int) -> Dataset:
    """Return a data set of at most num_rows rows of this one, evenly spread, in order, with first
    and last."""
    size = len(dataset)
    if size <= num_rows:
        return head_of(dataset, size)
    return Subset(dataset, torch.arange(num_rows) * (size - 1) // (num_rows - 1))


def last_first(dataset: Dataset) -> Dataset:
    """Return the data set with its last row moved to the second place, behind the first row."""
    rows = torch.arange(len(dataset))
    return (
        Subset(dataset, torch.cat([rows[:1], rows[-1:], rows[1:-1]])) if len(rows) > 1 else dataset
    )


def _few_of(data: Mapping[str, Dataset]) -> tuple[dict[str, Dataset], int]:
    """Return a few rows of each split, and the number of rows in the tried step."""
    few = {split: spread_over(dataset, _EVALUATED_ROWS) for split, dataset in data.items()}
    if "train" in few:
        few["train"] = last_first(few["train"])
    return few, min(_NUM_ROWS, len(few.get("train", ())))


def _shortened(job: JobSpec, num_rows: int) -> JobSpec:
    """Return the job with steps of num_rows rows, each computed by one worker in a single pass."""
    window = job.window.with_changes(micro_batch_size=None, steps=None)
    execution = job.execution.with_changes(mode="Eager", profiling=False, parallelism="None")
    if execution.accumulation_steps is not None:
        execution = execution.with_changes(gradient="Full")
    evaluation = job.evaluation
    if evaluation is not None:
        batch_size = min(evaluation.batch_size, _EVALUATED_BATCH)
        evaluation = evaluation.with_changes(batch_size=batch_size)
    return job.altered(
        strategy=Local(),
        batch_size=num_rows,
        accumulation=window,
        execution=execution,
        evaluation=evaluation,
        data=job.data.with_changes(order=None),
        compression=None,
        phases=None,
    )


def _setup(job: JobSpec, site: Site, data: Mapping[str, Dataset], *, fresh: bool) -> Setup:
    model = build_model(job, site.entrypoints, device=site.device, fresh=fresh)
    check_optimizer_of(job, model, site.entrypoints)
    setup = make_setup(job, site.entrypoints, model, data, make_gather(job, model, site.device))
    return replace(setup, epoch_rows=None)


def _exchange(trainer: Trainer) -> GradientReducer:
    return GradientReducer(trainer.buckets, _ALONE, SoloTransport(), trainer.compressor)


# ---- Local steps of clients ----
#
# The number of steps that the clients of a federation make is reported as far as it is known.


def local_steps(job: JobSpec, strategy: Federated, site: Site, num_rows: int) -> str:
    """Describe the number of steps that a client takes, in a sentence.

    The number is known only if clients get equal parts of the rows: not if rows are divided by
    label, made for each client or at its worker, or drawn for privacy.
    """
    count, partition = strategy.num_clients, job.partition
    clients = f"{count:,} clients" if count != 1 else "1 client"
    is_divided = (
        job.data.worker_local is None
        and (partition is None or partition.method == "contiguous")
        and job.privacy is None
        and not ClientData(job, site.entrypoints, site.sources).is_made_per_client
    )
    if not is_divided:
        return f"{clients}; the steps of each follow from its own rows"
    assert job.batch_size is not None
    steps = [-(-len(rows) // job.batch_size) for rows in split_rows(num_rows, count)]
    least, most = min(steps), max(steps)
    each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    words = "step" if most == 1 else "steps"
    epochs = strategy.options.local_epochs
    in_round = f", {epochs:,} of which are a round" if epochs > 1 else ""
    return f"{clients}, {each} {words} to a local epoch{in_round}"
