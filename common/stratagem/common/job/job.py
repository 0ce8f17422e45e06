"""The job: everything that decides a run.

`canonical_json` is the one text of a job: equal jobs have equal text, and reading it gives the job
back. The module does not know whether this installation can carry the job out.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, WrapSerializer

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.code.code_section import CodeSpec, RequirementText
from stratagem.common.job.compression import CompressionSpec
from stratagem.common.job.execution import AccumulationSpec, ExecutionSpec
from stratagem.common.job.fields import Every, Unit
from stratagem.common.job.nested import effective, flat
from stratagem.common.job.optimizer import OptimizerSpec, TurnSpec, WeightAverageSpec
from stratagem.common.job.privacy import PrivacySpec
from stratagem.common.job.rules import check_submitted, violations_of
from stratagem.common.job.schedules import HyperparameterSchedule, PhasesSpec
from stratagem.common.job.search_space import SearchSpaceField
from stratagem.common.job.sections import (
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    InitialSpec,
    LossSpec,
    ModelSpec,
    PartitionSpec,
    RecordingSpec,
    VerificationSpec,
)
from stratagem.common.numerics.rules import KEEPS_DTYPES
from stratagem.common.schema.document import (
    MAX_COUNT,
    Count,
    EntrypointName,
    Items,
    Name,
    NonEmptyItems,
    Section,
)
from stratagem.common.schema.json import dump_json, load_json
from stratagem.common.schema.rules import Partial, found_by, further, rule
from stratagem.common.strategy import Federated, Local, PopulationBased, local_steps_of
from stratagem.common.strategy.strategies import StrategyField

# One epoch reseeds with seed + epoch, which must stay in torch's range.
_MAX_SEED = MAX_COUNT // 2

_AT_ONCE = AccumulationSpec()
_ABSENT: Any = None
_IF_THERE = WrapSerializer(lambda section, write: None if section is None else write(section))

_UNITS: Mapping[type, Unit] = {Federated: "round", PopulationBased: "generation"}
"""The default unit of the interval between evaluations, keyed by strategy; epochs for others."""


class JobSpec(Section):
    """A validated job. `batch_size` is the global batch of one step.

    It is immutable at every depth, because all callers that parse the same text share it.

    A job whose execution computes no gradients trains nothing: it evaluates one state, has no
    optimizer, and its batches are those of the evaluation. step: an entry point (model, batch) that
    computes the value to minimise, in place of `loss`. predict: an entry point that returns
    (output, target) for metrics. turns: several optimizers, which take turns within each step.
    hyperparameter_schedule: fields that change during the training, such as those of a population's
    winner. placement_timeout_s: the time after which a run without workers fails; by default there
    is no limit.
    """

    name: Annotated[Name, Field(examples=["my-run"])]
    model: Annotated[ModelSpec, Field(examples=[{"entrypoint": "my_module:build_model"}])]
    data: Annotated[DataSpec, Field(examples=[{"entrypoint": "my_module:load_data"}])]
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
    verification: VerificationSpec | None = None
    placement_timeout_s: Annotated[float, Field(gt=0)] | None = None

    def _settle_strategy(self) -> Iterator[Violation]:
        """Merge strategies in the model graph into the job's; yield an error if they do not fit."""
        graph = self.model.graph
        try:
            if graph is not None and "strategy" not in self.model_fields_set:
                self.__dict__["strategy"] = graph.training_strategy or self.strategy
            self.__dict__["strategy"] = flat(self.strategy)
            if graph is not None:
                self.__dict__["strategy"] = effective(self.strategy, graph)
        except InvalidInputError as error:
            yield from error.violations

    def _settle_interval(self) -> Iterable[Violation]:
        """Fill in the default interval of the evaluations, which depends on the strategy."""
        evaluation = self.evaluation
        if evaluation and "every" not in evaluation.model_fields_set:
            local_steps = local_steps_of(self.strategy)
            units = (unit for kind, unit in _UNITS.items() if isinstance(self.strategy, kind))
            every = Every(1, next(units, "epoch"))
            if local_steps is not None:
                every = Every(local_steps, "step")
            self.__dict__["evaluation"] = evaluation.with_changes(every=every)
        return ()

    @rule
    def _of_several_sections(self) -> Iterator[Violation]:
        settling = (JobSpec._settle_strategy, JobSpec._settle_interval)
        violations = [*found_by(settling, self)]
        violations += further(violations_of(self), violations)
        yield from violations
        if violations or isinstance(self, Partial):  # else who runs it asks
            yield from further(check_submitted(self), violations)
        if self.only_evaluates and self.evaluation is not None:
            self.__dict__["batch_size"] = self.evaluation.batch_size

    @property
    def only_evaluates(self) -> bool:
        """Return whether the job trains nothing."""
        return not self.execution.computes_gradients

    @property
    def window(self) -> AccumulationSpec:
        """Return the settings of gradient accumulation, defaults included, with the `steps` that
        `execution.gradient: {Accumulated: n}` sets."""
        spec, steps = self.accumulation or _AT_ONCE, self.execution.accumulation_steps
        return spec if steps is None else spec.with_changes(steps=steps)

    @property
    def num_steps(self) -> int | None:
        """Return the number of steps of the whole training (rounds of a federation), or None if the
        job does not say."""
        return self.strategy.rounds if isinstance(self.strategy, Federated) else self.steps

    def optimizers(self) -> dict[str, OptimizerSpec]:
        """Return the optimizers of the job, keyed by path: a single one, or one per turn."""
        if self.turns is not None:
            return {f"turns[{i}].optimizer": turn.optimizer for i, turn in enumerate(self.turns)}
        return {} if self.optimizer is None else {"optimizer": self.optimizer}

    def canonical_json(self) -> str:
        """Return the document as compact JSON."""
        return dump_json(self.document())

    @staticmethod
    def from_json(text: str) -> "JobSpec":
        """Parse the JSON text of a job; cached, as several callers parse the same text."""
        return _read(text, ids.are_checked())

    @staticmethod
    def of_run(text: str, numerics: int) -> "JobSpec":
        """Parse the job of an existing run. numerics: the number of the run's numerics rules."""
        job = JobSpec.from_json(text)
        if numerics >= KEEPS_DTYPES or job.execution.precision is not None:
            return job
        return job.altered(execution=job.execution.altered(precision="Single"))


@lru_cache(maxsize=8)
def _read(text: str, _are_limits_checked: bool) -> JobSpec:
    return JobSpec.parse(load_json(text))
