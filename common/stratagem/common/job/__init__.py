"""The job document: its sections, how it is read from a file, its canonical text."""

from stratagem.common.code.code_section import CodeSpec
from stratagem.common.job.accumulation import AccumulationSpec
from stratagem.common.job.compression_section import CompressionSpec, exchanged_codec
from stratagem.common.job.derived_jobs import (
    entry_points,
    entry_points_by_field,
    member_job,
    scheduled_job,
    seed_of,
    with_fields,
)
from stratagem.common.job.execution_section import ExecutionSpec
from stratagem.common.job.initial_state import InitialSpec
from stratagem.common.job.interval import Every
from stratagem.common.job.job_files import load_job, parse_yaml
from stratagem.common.job.optimizer.optimizer_section import (
    GroupSpec,
    OptimizerSpec,
    check_optimizer,
)
from stratagem.common.job.optimizer.schedule_section import ScheduleSpec
from stratagem.common.job.optimizer.weight_average_section import WeightAverageSpec
from stratagem.common.job.phases_section import AdaptationSpec, PhasesSpec, PredictorSpec
from stratagem.common.job.privacy_section import PrivacySpec
from stratagem.common.job.sections import (
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    LossSpec,
    ModelSpec,
    PartitionSpec,
    RecordingSpec,
)
from stratagem.common.job.spec import JobSpec
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
