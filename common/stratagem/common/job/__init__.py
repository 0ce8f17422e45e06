"""The job document: its sections, how it is read from a file, its canonical text."""

from stratagem.common.graph import EdgeSpec, GraphSpec, NodeSpec, SubgraphSpec, effective_strategy
from stratagem.common.job.accumulation import AccumulationSpec
from stratagem.common.job.compression import CompressionSpec
from stratagem.common.job.derive import entry_points, with_fields
from stratagem.common.job.every import Every
from stratagem.common.job.execution import ExecutionSpec
from stratagem.common.job.files import load_job, parse_yaml
from stratagem.common.job.initial import InitialSpec
from stratagem.common.job.optimizers import check_optimizer
from stratagem.common.job.phases import AdaptationSpec, PhasesSpec, PredictorSpec
from stratagem.common.job.sections import (
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    PartitionSpec,
    ScheduleSpec,
)
from stratagem.common.job.spec import JobSpec

__all__ = [
    "AccumulationSpec",
    "AdaptationSpec",
    "CheckpointSpec",
    "CompressionSpec",
    "DataSpec",
    "EdgeSpec",
    "EvaluationSpec",
    "Every",
    "ExecutionSpec",
    "GraphSpec",
    "InitialSpec",
    "JobSpec",
    "LossSpec",
    "ModelSpec",
    "NodeSpec",
    "OptimizerSpec",
    "PartitionSpec",
    "PhasesSpec",
    "PredictorSpec",
    "ScheduleSpec",
    "SubgraphSpec",
    "check_optimizer",
    "effective_strategy",
    "entry_points",
    "load_job",
    "parse_yaml",
    "with_fields",
]
