"""The job: everything that decides a run, and the checks that concern several sections at once.

`canonical_json` is the one text of a job: equal jobs have equal text, and reading it gives the
job back. Does not know whether this installation can carry the job out.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import Field, WrapSerializer, model_validator

from stratagem.common.base import limits
from stratagem.common.base.errors import Violation
from stratagem.common.code.code_section import CodeSpec, RequirementText
from stratagem.common.job.accumulation import AccumulationSpec, check_accumulation
from stratagem.common.job.compression_section import (
    CompressionSpec,
    exchanged_codec,
    why_not_compressed,
)
from stratagem.common.job.evaluation.followed_metric import check_followed
from stratagem.common.job.evaluation_only import check_evaluating
from stratagem.common.job.execution_section import ExecutionSpec
from stratagem.common.job.federation.client_state_rules import check_client_state
from stratagem.common.job.federation.secure_rules import check_secure_aggregation
from stratagem.common.job.initial_state import InitialSpec, check_resumed
from stratagem.common.job.interval import Every, Unit
from stratagem.common.job.nested_strategies import effective, flat
from stratagem.common.job.objective.step_checks import check_objective
from stratagem.common.job.objective.turns_section import TurnSpec, check_turns
from stratagem.common.job.optimizer.control_rules import check_control_of
from stratagem.common.job.optimizer.hyperparameter_schedule import (
    HyperparameterSchedule,
    check_schedule,
)
from stratagem.common.job.optimizer.local_step_rules import OF_ONE_MODEL, check_local_steps
from stratagem.common.job.optimizer.optimizer_section import OptimizerSpec
from stratagem.common.job.optimizer.partition_rules import (
    OF_WHOLE_GRADIENTS,
    OF_WHOLE_PARAMETERS,
    check_partition,
)
from stratagem.common.job.optimizer.schedule_section import ScheduleSpec
from stratagem.common.job.optimizer.weighing_rules import check_weighing_of
from stratagem.common.job.optimizer.weight_average_section import WeightAverageSpec
from stratagem.common.job.optimizer.weight_average_section import (
    reason_against as why_not_averaged,
)
from stratagem.common.job.phases_section import PhasesSpec, reason_against
from stratagem.common.job.privacy_section import PrivacySpec, check_privacy
from stratagem.common.job.search_section import SearchSpaceField
from stratagem.common.job.sections import (
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    LossSpec,
    ModelSpec,
    PartitionSpec,
    RecordingSpec,
)
from stratagem.common.job.stream_rules import against_streams, says_stream
from stratagem.common.schema.document import Section, refuse
from stratagem.common.schema.field_types import (
    MAX_COUNT,
    Count,
    EntrypointName,
    Items,
    Name,
    NonEmptyItems,
)
from stratagem.common.schema.json_text import dump_json, load_json
from stratagem.common.strategy import (
    DIRECT_ALL_REDUCE,
    Custom,
    Federated,
    Local,
    PopulationBased,
    all_reduce_of,
    local_steps_of,
)
from stratagem.common.strategy.kinds import StrategyField
from stratagem.common.strategy.regions import are_named

# One epoch reseeds with seed + epoch, which must stay in torch's range.
_MAX_SEED = MAX_COUNT // 2


_AT_ONCE = AccumulationSpec()
_ABSENT: Any = None
_IF_THERE = WrapSerializer(lambda section, write: None if section is None else write(section))

_UNITS: Mapping[type, Unit] = {Federated: "round", PopulationBased: "generation"}
"""What a strategy counts its evaluations in, unless the job says otherwise; else epochs."""


class JobSpec(Section):
    """A validated job. `batch_size` is the global batch of one step.

    Nothing in it can be changed, at any depth: it is shared by all that read the same text.

    A job whose execution computes no gradients trains nothing: it evaluates one state, has no
    optimizer, and its batches are those of the evaluation. step: an entry point (model, batch) that
    computes what is minimised, in place of loss; predict: one that returns (output, target) for
    metrics; turns: several optimizers, which take turns within each step. hyperparameter_schedule:
    fields that change during the training, such as those of a population's winner.
    placement_timeout_s: how long the run may be without workers before it fails; no limit unless
    set.
    """

    name: Name
    model: ModelSpec
    data: DataSpec
    code: CodeSpec | None = None
    requires: NonEmptyItems[RequirementText] | None = None
    # Code that computes a loss of the model's output need not ask whether the job has one.
    loss: Annotated[LossSpec, _IF_THERE] = _ABSENT
    step: EntrypointName | None = None
    predict: EntrypointName | None = None
    turns: Items[TurnSpec] | None = None
    # Only a job that trains nothing has none; code that trains need not ask.
    optimizer: Annotated[OptimizerSpec, _IF_THERE] = _ABSENT
    weight_average: WeightAverageSpec | None = None
    callbacks: EntrypointName | None = None
    initial: InitialSpec | None = None
    evaluation: EvaluationSpec | None = None
    checkpoint: CheckpointSpec = CheckpointSpec()
    epochs: Count | None = None
    steps: Count | None = None
    batch_size: Count = _ABSENT
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] = 0
    strategy: StrategyField = Local()
    accumulation: AccumulationSpec | None = None
    execution: ExecutionSpec = ExecutionSpec()
    compression: CompressionSpec | None = None
    phases: PhasesSpec | None = None
    privacy: PrivacySpec | None = None
    partition: PartitionSpec | None = None
    search_space: SearchSpaceField | None = None
    steps_per_generation: Count | None = None
    hyperparameter_schedule: HyperparameterSchedule | None = None
    retention: Count = 2
    recording: RecordingSpec | None = None
    placement_timeout_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _settle(self) -> Self:
        """Fill in what depends on another section, then check what concerns several."""
        own = self.model.graph.training_strategy if self.model.graph else None
        if own is not None and "strategy" not in self.model_fields_set:
            self.__dict__["strategy"] = own
        self.__dict__["strategy"] = flat(self.strategy)
        if self.model.graph is not None:
            self.__dict__["strategy"] = effective(self.strategy, self.model.graph)
        evaluation = self.evaluation
        if evaluation and "every" not in evaluation.model_fields_set:
            local_steps = local_steps_of(self.strategy)
            every = Every(1, _UNITS.get(type(self.strategy), "epoch"))
            if local_steps is not None:
                every = Every(local_steps, "step")
            settled = evaluation.model_copy(update={"every": every})
            self.__dict__["evaluation"] = settled
        if self.only_evaluates:
            refuse(
                [
                    *check_objective(self),
                    *check_evaluating(self),
                    *_federated_only(self),
                    *_execution(self),
                ]
            )
            assert self.evaluation is not None
            self.__dict__["batch_size"] = self.evaluation.batch_size
            return self
        refuse(
            [
                *_missing(self),
                *check_objective(self),
                *check_turns(self),
                *_length(self),
                *_federated_only(self),
                *_population_only(self),
                *_units(self),
                *_recording(self),
                *check_schedule(self, _num_steps(self)),
                *check_resumed(self.initial, self.strategy, _num_steps(self)),
                *check_followed(self.strategy, self.evaluation, _plateau(self)),
                *_graph_strategy(self),
                *_order_of_sums(self),
                *_compression(self),
                *check_accumulation(self),
                *_execution(self),
                *_phases(self),
                *_weight_average(self),
                *_local_steps(self),
                *_partition(self),
                *check_privacy(self),
                *_weighing(self),
                *check_client_state(
                    self.strategy,
                    is_at_workers=self.data.worker_local is not None,
                    is_private=self.privacy is not None,
                    is_evaluated=self.evaluation is not None,
                ),
                *_secure_aggregation(self),
                *(against_streams(self) if says_stream(self) else ()),
            ]
        )
        return self

    @property
    def only_evaluates(self) -> bool:
        """Return whether the job trains nothing."""
        return not self.execution.computes_gradients

    @property
    def window(self) -> AccumulationSpec:
        """Return how the gradient of a step is accumulated: as the section says, or the default
        without it; `execution.gradient: {Accumulated: n}` is another way to set its `steps`."""
        own, steps = self.accumulation or _AT_ONCE, self.execution.accumulation_steps
        return own if steps is None else own.model_copy(update={"steps": steps})

    def optimizers(self) -> dict[str, OptimizerSpec]:
        """Return the optimizers of the job by their paths: one, or that of each turn."""
        if self.turns is not None:
            return {f"turns[{i}].optimizer": turn.optimizer for i, turn in enumerate(self.turns)}
        return {} if self.optimizer is None else {"optimizer": self.optimizer}

    def canonical_json(self) -> str:
        """The document as compact JSON."""
        return dump_json(self.document())

    @staticmethod
    def from_json(text: str) -> "JobSpec":
        """The job from its JSON text; the latest ones are kept, as several readers follow."""
        return _read(text, limits.are_checked())


@lru_cache(maxsize=8)
def _read(text: str, _are_limits_checked: bool) -> JobSpec:
    return JobSpec.parse(load_json(text))


def _weighing(job: JobSpec) -> Iterator[Violation]:
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


def _plateau(job: JobSpec) -> ScheduleSpec | None:
    return None if job.optimizer is None else job.optimizer.plateau


def _num_steps(job: JobSpec) -> int | None:
    return job.strategy.rounds if isinstance(job.strategy, Federated) else job.steps


def _missing(job: JobSpec) -> list[Violation]:
    needed = ("batch_size",) if job.turns is not None else ("optimizer", "batch_size")
    return [Violation(name, "missing") for name in needed if getattr(job, name) is None]


def _length(job: JobSpec) -> list[Violation]:
    given = [name for name in ("epochs", "steps") if getattr(job, name) is not None]
    kind = type(job.strategy).__name__
    match job.strategy:
        case Federated():
            text = "has no meaning under Federated; strategy.rounds and options.local_epochs have"
            return [Violation(name, text) for name in given]
        case PopulationBased():
            text = "has no meaning under PopulationBased; steps_per_generation has"
            return [Violation(name, text) for name in given]
        case Custom() if not given:
            return []  # the plug-in may count in units of its own
        case _ if not given:
            return [Violation("epochs", f"missing; {kind} needs epochs or steps")]
        case _ if len(given) == 2:
            return [Violation("steps", "epochs is set already; only one of the two may be")]
        case _:
            return []


def _federated_only(job: JobSpec) -> list[Violation]:
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


def _population_only(job: JobSpec) -> list[Violation]:
    if isinstance(job.strategy, PopulationBased):
        return _population_needs(job)
    kind = type(job.strategy).__name__
    text = f"belongs to PopulationBased only; the strategy is {kind}"
    return [
        Violation(name, text)
        for name in ("search_space", "steps_per_generation")
        if getattr(job, name) is not None
    ]


def _population_needs(job: JobSpec) -> list[Violation]:
    violations = []
    if job.search_space is None or not job.search_space.dimensions:
        text = "missing; PopulationBased needs hyperparameters to explore"
        violations.append(Violation("search_space", text))
    if job.steps_per_generation is None:
        text = "missing; the optimizer steps of one generation"
        violations.append(Violation("steps_per_generation", text))
    if job.evaluation is None or job.evaluation.best is None:
        text = "missing; PopulationBased needs a metric to compare members by"
        violations.append(Violation("evaluation.best", text))
    if job.checkpoint.every is not None:
        text = "is not allowed; members are committed after every generation"
        violations.append(Violation("checkpoint.every", text))
    return violations


def _recording(job: JobSpec) -> list[Violation]:
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


def _units(job: JobSpec) -> list[Violation]:
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


def _order_of_sums(job: JobSpec) -> list[Violation]:
    how = all_reduce_of(job.strategy)
    if how == DIRECT_ALL_REDUCE or not job.execution.deterministic:
        return []
    text = f"{how} adds in an order that depends on the workers; set execution.deterministic: false"
    return [Violation("strategy.options.all_reduce", text)]


def _secure_aggregation(job: JobSpec) -> Iterator[Violation]:
    return check_secure_aggregation(
        job.strategy,
        is_coded=job.compression is not None and job.compression.codec != "none",
        is_private=job.privacy is not None,
        evaluates_at_clients=job.evaluation is not None and job.data.worker_local is not None,
        records_clients=job.recording is not None and job.recording.client_steps,
    )


def _compression(job: JobSpec) -> list[Violation]:
    if job.compression is None:
        return []
    return list(why_not_compressed(job.compression, job.strategy, job.execution.precision))


def _execution(job: JobSpec) -> list[Violation]:
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


def _phases(job: JobSpec) -> list[Violation]:
    if job.phases is None:
        return []
    reason = reason_against(job.strategy)
    if reason is None and not job.execution.deterministic:
        reason = "needs execution.deterministic: replicas decide alike only on equal bits"
    return [] if reason is None else [Violation("phases", reason)]


def _weight_average(job: JobSpec) -> list[Violation]:
    if job.weight_average is None:
        if job.evaluation is not None and job.evaluation.of == "average":
            return [Violation("evaluation.of", "there is no average without weight_average")]
        return []
    reason = why_not_averaged(job.strategy)
    return [] if reason is None else [Violation("weight_average", reason)]


def _local_steps(job: JobSpec) -> Iterator[Violation]:
    given = {
        "evaluation.every": job.evaluation.every if job.evaluation else None,
        "checkpoint.every": job.checkpoint.every,
    }
    periods = {name: (every.count, every.unit) for name, every in given.items() if every}
    sections = [name for name in OF_ONE_MODEL if getattr(job, name) is not None]
    yield from check_local_steps(job.strategy, periods, sections)
    bits, precision = exchanged_codec(None, job.strategy), job.execution.precision
    if bits is not None and precision not in ("Single", "Mixed"):
        text = f"codes float32; precision is {precision}"
        yield Violation("strategy.options.outer_bits", text)


def _partition(job: JobSpec) -> Iterator[Violation]:
    settings = [name for name in OF_WHOLE_GRADIENTS if getattr(job, name) is not None]
    is_there = {
        "weight_average": job.weight_average is not None,
        "execution.mode": job.execution.mode != "Eager",
        "execution.precision": job.execution.precision == "Half",
    }
    settings += [name for name in OF_WHOLE_PARAMETERS if is_there[name]]
    yield from check_partition(job.strategy, job.optimizer, settings)


def _graph_strategy(job: JobSpec) -> list[Violation]:
    own = job.model.graph.training_strategy if job.model.graph else None
    if own is None or job.model.graph is None:
        return []
    if effective(flat(own), job.model.graph) == job.strategy:
        return []
    return [Violation("model.graph.training_strategy", "differs from strategy; set one of the two")]
