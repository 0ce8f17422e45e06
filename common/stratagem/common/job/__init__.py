"""This package defines the job document: its sections, its rules, and its canonical text.

- section: a mapping of the document, checked by a class of its own
- setting: hyperparameters that apply from a step on
- turn: one of several optimizers that take turns within each step
- phases: steps with computed gradients (Full) in turn with steps with predicted ones (Predict)
"""

from stratagem.common.code.code_section import CodeSpec
from stratagem.common.job.compression import CompressionSpec, exchanged_codec
from stratagem.common.job.derived import (
    entry_points,
    entry_points_by_field,
    member_job,
    scheduled_job,
    seed_of,
    with_fields,
)
from stratagem.common.job.execution import AccumulationSpec, ExecutionSpec
from stratagem.common.job.fields import Every
from stratagem.common.job.files import load_job, parse_yaml
from stratagem.common.job.job import JobSpec
from stratagem.common.job.optimizer import (
    GroupSpec,
    OptimizerSpec,
    WeightAverageSpec,
    check_optimizer,
)
from stratagem.common.job.privacy import PrivacySpec
from stratagem.common.job.schedules import AdaptationSpec, PhasesSpec, PredictorSpec, ScheduleSpec
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
from stratagem.common.model.graph import (
    EdgeSpec,
    GraphSpec,
    NodeSpec,
    SubgraphSpec,
    effective_strategy,
)

__all__ = [
    "AccumulationSpec",
    "AdaptationSpec",
    "CheckpointSpec",
    "CodeSpec",
    "CompressionSpec",
    "DataSpec",
    "EdgeSpec",
    "EvaluationSpec",
    "Every",
    "ExecutionSpec",
    "GraphSpec",
    "GroupSpec",
    "InitialSpec",
    "JobSpec",
    "LossSpec",
    "ModelSpec",
    "NodeSpec",
    "OptimizerSpec",
    "PartitionSpec",
    "PhasesSpec",
    "PredictorSpec",
    "PrivacySpec",
    "RecordingSpec",
    "ScheduleSpec",
    "SubgraphSpec",
    "VerificationSpec",
    "WeightAverageSpec",
    "check_optimizer",
    "effective_strategy",
    "entry_points",
    "entry_points_by_field",
    "exchanged_codec",
    "load_job",
    "member_job",
    "parse_yaml",
    "scheduled_job",
    "seed_of",
    "with_fields",
]
