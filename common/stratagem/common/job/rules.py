"""Check the rules of a job that concern several of its sections at once.

Each section checks itself; the combined rules run once all sections are read, so all errors are
reported at once.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from stratagem.common.base.errors import Violation
from stratagem.common.job.accumulation import check_accumulation
from stratagem.common.job.compression import exchanged_codec, why_not_compressed
from stratagem.common.job.execution import ModelParallel, PipelineParallel
from stratagem.common.job.fields import Every, Unit, check_followed
from stratagem.common.job.nested import effective, flat
from stratagem.common.job.optimizer import reason_against as why_not_averaged
from stratagem.common.job.privacy import check_privacy
from stratagem.common.job.schedules import ScheduleSpec, check_schedule, reason_against
from stratagem.common.job.sections import check_resumed
from stratagem.common.job.training_rules import (
    OF_ONE_MODEL,
    OF_WHOLE_GRADIENTS,
    OF_WHOLE_PARAMETERS,
    against_streams,
    check_client_state,
    check_control_of,
    check_local_steps,
    check_objective,
    check_partition,
    check_secure_aggregation,
    check_weighing_of,
    says_stream,
)
from stratagem.common.job.turns import check_turns
from stratagem.common.schema.rules import UnreadFieldError, found_by
from stratagem.common.strategy import (
    DIRECT_ALL_REDUCE,
    AllReduce,
    Custom,
    DataParallel,
    Federated,
    Local,
    PopulationBased,
    all_reduce_of,
)
from stratagem.common.strategy import ModelParallel as Stages
from stratagem.common.strategy.regions import are_named

if TYPE_CHECKING:
    from stratagem.common.job.job import JobSpec

# ---- Evaluation only ----
#
# A job with `execution.gradient: None` trains nothing. It evaluates one state, once, on all rows
# of one split. The rules name the fields such a job has, and say why others have no place in it.

_WHY: Final = "execution.gradient is None, so nothing is trained"
_EXAMPLE: Final = "evaluation: {split: test}"
_TRAINING_FIELDS: Final = {
    "optimizer": "there is nothing to update",
    "weight_average": "there are no updates to average over",
    "epochs": "each row is evaluated once",
    "steps": "each row is evaluated once",
    "accumulation": "there are no gradients to add up",
    "compression": "there are no gradients to code",
    "phases": "there are no gradients to predict",
    "privacy": "there are no clients to protect",
    "partition": "there are no clients to divide the rows among",
    "search_space": "there is nothing to tune",
    "steps_per_generation": "there are no steps",
    "hyperparameter_schedule": "there are no steps",
}


def check_evaluating(job: "JobSpec") -> list[Violation]:
    """Return what a job without gradients says that belongs to training, and what it lacks."""
    violations = [
        Violation(name, f"{_WHY}: {reason}; leave it out")
        for name, reason in _TRAINING_FIELDS.items()
        if getattr(job, name) is not None
    ]
    if job.initial is not None and job.initial.resume is not None:
        violations.append(
            Violation("initial.resume", f"{_WHY}: there are no steps to go on with; leave it out")
        )
    if job.checkpoint.every is not None:
        violations.append(
            Violation("checkpoint.every", f"{_WHY}: there is one state; leave it out")
        )
    return [*violations, *_evaluation(job), *_strategy(job)]


def _evaluation(job: "JobSpec") -> list[Violation]:
    own = job.evaluation
    if own is None:
        return [
            Violation(
                "evaluation",
                f"missing; {_WHY}, and it says what is evaluated, for example {_EXAMPLE}",
            )
        ]
    violations = []
    if own.best is not None:
        violations.append(Violation("evaluation.best", f"{_WHY}: there is one state; leave it out"))
    if own.stop is not None:
        violations.append(Violation("evaluation.stop", f"{_WHY}: there is one state; leave it out"))
    if own.of == "average":
        text = f"{_WHY}: there is no average; begin from the file of one, as initial.file"
        violations.append(Violation("evaluation.of", text))
    if own.every != Every(1, "epoch"):
        text = f"{_WHY}: it is evaluated once; leave it out"
        violations.append(Violation("evaluation.every", text))
    if "batch_size" in job.model_fields_set and job.batch_size != own.batch_size:
        text = f"is {job.batch_size}, and evaluation.batch_size {own.batch_size}; leave one out"
        violations.append(Violation("batch_size", text))
    return violations


def _strategy(job: "JobSpec") -> list[Violation]:
    asked = job.execution.parallelism
    if isinstance(asked, ModelParallel | PipelineParallel):
        text = (
            f"{type(asked).__name__} cuts a model by what training costs; {_WHY}. Say strategy: "
            "ModelParallel with partitions, or DataParallel, which divides rows"
        )
        return [Violation("execution.parallelism", text)]
    match job.strategy:
        case Local():
            return []
        case DataParallel(aggregation=AllReduce(), options=options):
            violations = []
            if not isinstance(options.inner, Local | None):
                text = f"{_WHY}: a replica is one worker; leave it out"
                violations.append(Violation("strategy.options.inner", text))
            if options.all_reduce != DIRECT_ALL_REDUCE:
                text = f"{_WHY}: there is nothing to add up; leave it out"
                violations.append(Violation("strategy.options.all_reduce", text))
            return violations
        case Stages():
            if job.evaluation is None or not job.evaluation.predictions:
                return []
            text = "is not possible under ModelParallel: outputs are with the last stage alone"
            return [Violation("evaluation.predictions", text)]
        case DataParallel():
            text = f"{_WHY}: there is nothing to aggregate; AllReduce stands for plain replicas"
            return [Violation("strategy.aggregation.method", text)]
        case other:
            kinds = "Local, DataParallel and ModelParallel evaluate"
            text = f"{type(other).__name__} trains, and {_WHY}; {kinds}"
            return [Violation("strategy.type", text)]


# ---- Whole job ----

_Rules: TypeAlias = tuple[Callable[["JobSpec"], Iterable[Violation]], ...]


def violations_of(job: "JobSpec") -> Iterator[Violation]:
    """Yield what is wrong with a job beyond what each section says by itself; of a job of which
    some fields are wrong, what the others say together."""
    try:
        rules: _Rules = _OF_EVALUATION if job.only_evaluates else _OF_TRAINING
    except UnreadFieldError:
        rules = tuple(each for each in _OF_TRAINING if each in _OF_EVALUATION)
    yield from found_by(rules, job)


def _schedule(job: "JobSpec") -> Iterator[Violation]:
    return check_schedule(job, _num_steps(job))


def _resumed(job: "JobSpec") -> Iterator[Violation]:
    return check_resumed(job.initial, job.strategy, _num_steps(job))


def _followed(job: "JobSpec") -> Iterator[Violation]:
    return check_followed(job.strategy, job.evaluation, _plateau(job))


def _client_state(job: "JobSpec") -> Iterator[Violation]:
    return check_client_state(
        job.strategy,
        is_at_workers=job.data.worker_local is not None,
        is_private=job.privacy is not None,
        is_evaluated=job.evaluation is not None,
    )


def _streams(job: "JobSpec") -> Iterator[Violation]:
    if says_stream(job):
        yield from against_streams(job)


def _weighing(job: "JobSpec") -> Iterator[Violation]:
    has = {
        "privacy": job.privacy is not None,
        "data.streams": says_stream(job),
        "turns": job.turns is not None,
        "hyperparameter_schedule": job.hyperparameter_schedule is not None,
        "compression.codec": job.compression is not None and job.compression.codec != "none",
    }
    sections = [name for name, is_given in has.items() if is_given]
    yield from check_weighing_of(job.strategy, job.optimizer, sections)
    yield from check_control_of(job.strategy, job.optimizer, sections)


def _plateau(job: "JobSpec") -> ScheduleSpec | None:
    return None if job.optimizer is None else job.optimizer.plateau


def _num_steps(job: "JobSpec") -> int | None:
    return job.strategy.rounds if isinstance(job.strategy, Federated) else job.steps


def _missing(job: "JobSpec") -> list[Violation]:
    needed = {"batch_size": "batch_size: 32"}
    if job.turns is None:
        needed = {"optimizer": "optimizer: {name: sgd, lr: 0.1}", **needed}
    return [
        Violation(name, f"missing; for example {line}")
        for name, line in needed.items()
        if getattr(job, name) is None
    ]


def _length(job: "JobSpec") -> list[Violation]:
    given = [name for name in ("epochs", "steps") if getattr(job, name) is not None]
    kind = type(job.strategy).__name__
    match job.strategy:
        case Federated():
            text = "has no meaning under Federated; strategy.rounds and options.local_epochs have; "
            text += "leave it out"
            return [Violation(name, text) for name in given]
        case PopulationBased():
            text = "has no meaning under PopulationBased; steps_per_generation has; leave it out"
            return [Violation(name, text) for name in given]
        case Custom() if not given:
            return []  # the plug-in may count in units of its own
        case _ if not given:
            return [
                Violation("epochs", f"missing; {kind} needs epochs or steps, for example epochs: 5")
            ]
        case _ if len(given) == 2:
            return [Violation("steps", "epochs is set already; only one of the two may be")]
        case _:
            return []


def _federated_only(job: "JobSpec") -> list[Violation]:
    violations = []
    federated, kind = isinstance(job.strategy, Federated), type(job.strategy).__name__
    if job.partition and not federated and job.partition.client is None:
        violations.append(
            Violation("partition", f"belongs to Federated only; the strategy is {kind}")
        )
    if job.partition and federated and job.partition.client is not None:
        violations.append(Violation("partition.client", "has no meaning under Federated itself"))
    if federated and job.data.order is not None and job.data.order.by != "shuffle":
        text = "is not allowed with strategy Federated, whose clients shuffle their own rows"
        violations.append(Violation("data.order", text))
    if job.data.worker_local and not federated:
        text = f"belongs to Federated only; the strategy is {kind}"
        violations.append(Violation("data.worker_local", text))
    regions = job.strategy.options.regions if isinstance(job.strategy, Federated) else None
    if not job.data.worker_local and are_named(regions or {}):
        text = "names sites, which are workers with rows of their own; give data.worker_local, or "
        violations.append(Violation("strategy.options.regions", text + "numbers of clients"))
    if job.partition and job.data.worker_local and federated:
        violations.append(Violation("partition", "worker_local data is divided by where it is"))
    return violations


def _population_only(job: "JobSpec") -> list[Violation]:
    if isinstance(job.strategy, PopulationBased):
        return _population_needs(job)
    kind = type(job.strategy).__name__
    text = f"belongs to PopulationBased only; the strategy is {kind}"
    return [
        Violation(name, text)
        for name in ("search_space", "steps_per_generation")
        if getattr(job, name) is not None
    ]


def _population_needs(job: "JobSpec") -> list[Violation]:
    violations = []
    if job.search_space is None or not job.search_space.dimensions:
        text = "missing; PopulationBased needs hyperparameters to explore, for example "
        text += "search_space: {optimizer.lr: {low: 0.001, high: 0.1, scale: log}}"
        violations.append(Violation("search_space", text))
    if job.steps_per_generation is None:
        text = (
            "missing; the optimizer steps of one generation, for example steps_per_generation: 50"
        )
        violations.append(Violation("steps_per_generation", text))
    if job.evaluation is None or job.evaluation.best is None:
        line = "best: loss" if job.evaluation else "evaluation: {best: loss, mode: min}"
        text = f"missing; PopulationBased needs a metric to compare members by, for example {line}"
        violations.append(Violation("evaluation.best", text))
    if job.checkpoint.every is not None:
        text = "is not allowed; members are committed after every generation"
        violations.append(Violation("checkpoint.every", text))
    return violations


def _recording(job: "JobSpec") -> list[Violation]:
    """What would be recorded of nobody."""
    if job.recording is None or not job.recording.client_steps:
        return []
    strategy, where = job.strategy, "recording.client_steps"
    if isinstance(strategy, PopulationBased):
        strategy = strategy.options.inner or Local()
    is_client = job.partition is not None and job.partition.client is not None
    kind = type(strategy).__name__
    if not isinstance(strategy, Federated | Custom) and not is_client:
        return [Violation(where, f"belongs to Federated only; the strategy is {kind}")]
    if not job.recording.steps:
        return [Violation(where, "needs recording.steps")]
    return []


def _units(job: "JobSpec") -> list[Violation]:
    violations = []
    federated, kind = isinstance(job.strategy, Federated), type(job.strategy).__name__
    allowed: tuple[Unit, ...] = ("round",) if federated else ("step", "epoch")
    if isinstance(job.strategy, PopulationBased):
        allowed = ("generation",)
    if isinstance(job.strategy, Custom):
        allowed = ("step", "epoch", "round")
    for name, every in (
        ("evaluation.every", job.evaluation.every if job.evaluation else None),
        ("checkpoint.every", job.checkpoint.every),
    ):
        if every is not None and every.unit not in allowed:
            units = " or ".join(f"{unit}s" for unit in allowed)
            violations.append(
                Violation(name, f"'{every}' is not allowed; {kind} counts in {units}")
            )
    return violations


def _order_of_sums(job: "JobSpec") -> list[Violation]:
    how = all_reduce_of(job.strategy)
    if how == DIRECT_ALL_REDUCE or not job.execution.deterministic:
        return []
    text = f"{how} adds in an order that depends on the workers; set execution.deterministic: false"
    return [Violation("strategy.options.all_reduce", text)]


def _secure_aggregation(job: "JobSpec") -> Iterator[Violation]:
    return check_secure_aggregation(
        job.strategy,
        is_coded=job.compression is not None and job.compression.codec != "none",
        is_private=job.privacy is not None,
        evaluates_at_clients=job.evaluation is not None and job.data.worker_local is not None,
        records_clients=job.recording is not None and job.recording.client_steps,
    )


def _compression(job: "JobSpec") -> list[Violation]:
    if job.compression is None:
        return []
    return list(why_not_compressed(job.compression, job.strategy, job.execution.precision))


def _execution(job: "JobSpec") -> list[Violation]:
    violations = []
    if job.data.collate is not None and job.execution.memory == "Cached":
        text = "Cached reads each row once, so it cannot go with data.collate; leave one out"
        violations.append(Violation("execution.memory", text))
    if job.data.readers and job.execution.memory == "Cached":
        text = "Cached reads each row once, so it cannot go with data.readers; leave one out"
        violations.append(Violation("execution.memory", text))
    if job.evaluation and job.evaluation.predictions and not job.only_evaluates:
        text = "belongs to a job that only evaluates: set execution.gradient to None"
        violations.append(Violation("evaluation.predictions", text))
    own = job.accumulation
    if job.execution.accumulation_steps is not None and own is not None:
        for name in ("micro_batch_size", "steps"):
            if getattr(own, name) is not None:
                text = f"Accumulated says what accumulation.{name} says already; leave one out"
                violations.append(Violation("execution.gradient", text))
    if job.execution.parallelism != "None" and not isinstance(job.strategy, Local):
        kind = type(job.strategy).__name__
        text = f"chooses the strategy, which is {kind} already; leave one of the two out"
        violations.append(Violation("execution.parallelism", text))
    return violations


def _phases(job: "JobSpec") -> list[Violation]:
    if job.phases is None:
        return []
    reason = reason_against(job.strategy)
    if reason is None and not job.execution.deterministic:
        reason = "needs execution.deterministic: replicas decide alike only on equal bits"
    return [] if reason is None else [Violation("phases", reason)]


def _weight_average(job: "JobSpec") -> list[Violation]:
    if job.weight_average is None:
        if job.evaluation is not None and job.evaluation.of == "average":
            return [Violation("evaluation.of", "there is no average without weight_average")]
        return []
    reason = why_not_averaged(job.strategy)
    return [] if reason is None else [Violation("weight_average", reason)]


def _local_steps(job: "JobSpec") -> Iterator[Violation]:
    given = {
        "evaluation.every": job.evaluation.every if job.evaluation else None,
        "checkpoint.every": job.checkpoint.every,
    }
    periods = {name: (every.count, every.unit) for name, every in given.items() if every}
    sections = [name for name in OF_ONE_MODEL if getattr(job, name) is not None]
    yield from check_local_steps(job.strategy, periods, sections)
    bits, precision = exchanged_codec(None, job.strategy), job.execution.precision
    if bits is not None and precision in ("Full", "Half"):
        text = f"codes float32; precision is {precision}"
        yield Violation("strategy.options.outer_bits", text)


def _partition(job: "JobSpec") -> Iterator[Violation]:
    settings = [name for name in OF_WHOLE_GRADIENTS if getattr(job, name) is not None]
    is_there = {
        "weight_average": job.weight_average is not None,
        "execution.mode": job.execution.mode != "Eager",
        "execution.precision": job.execution.precision == "Half",
    }
    settings += [name for name in OF_WHOLE_PARAMETERS if is_there[name]]
    yield from check_partition(job.strategy, job.optimizer, settings)


def _graph_strategy(job: "JobSpec") -> list[Violation]:
    own = job.model.graph.training_strategy if job.model.graph else None
    if own is None or job.model.graph is None:
        return []
    if effective(flat(own), job.model.graph) == job.strategy:
        return []
    return [Violation("model.graph.training_strategy", "differs from strategy; set one of the two")]


_OF_EVALUATION: Final = (check_objective, check_evaluating, _federated_only, _execution)
_OF_TRAINING: Final = (
    *(_missing, check_objective, check_turns, _length, _federated_only, _population_only, _units),
    *(_recording, _schedule, _resumed, _followed, _graph_strategy, _order_of_sums, _compression),
    *(check_accumulation, _execution, _phases, _weight_average, _local_steps, _partition),
    *(check_privacy, _weighing, _client_state, _secure_aggregation, _streams),
)
"""Each reads what it needs of a job, and says nothing further once it asks for a field that is
wrong."""
