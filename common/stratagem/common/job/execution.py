"""Define, as one value, how a job is computed: mode, gradients, precision, memory, parallelism.

The value says what is requested; whether an installation supports it is checked where it is
applied. A preset only abbreviates other fields: it is expanded when the section is read, so that
two sections with the same meaning are equal.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import model_validator

from stratagem.common.base.errors import Violation
from stratagem.common.numerics.shards import split_rows
from stratagem.common.process.cpu_threads import available_cores
from stratagem.common.schema.document import Count, DocumentValue, OneKey, Section
from stratagem.common.schema.rules import rule

MAX_LOCAL_WORKERS: Final = 8
"""The largest number of workers that `Automatic` stands for before it has been resolved."""


class Checkpointed(DocumentValue):
    """Keep the activations of every `interval`-th block only; compute the others again."""

    interval: Count


class Accumulated(DocumentValue):
    """Cut each shard into `steps` micro-batches and add their gradients before the update."""

    steps: Count


class DataParallel(DocumentValue):
    """Each batch is cut over `num_workers` workers."""

    num_workers: Count


class ModelParallel(DocumentValue):
    """The model is cut over `num_devices` workers."""

    num_devices: Count


class PipelineParallel(DocumentValue):
    """The model is cut into `num_stages` stages, fed with micro-batches."""

    num_stages: Count


Variant: TypeAlias = Checkpointed | Accumulated | DataParallel | ModelParallel | PipelineParallel
Mode: TypeAlias = Literal["Eager", "Lazy", "Hybrid"]
Precision: TypeAlias = Literal["Full", "Single", "Mixed", "Half"]
MemoryStrategy: TypeAlias = Literal["Standard", "Pooled", "Cached", "MinimalPeak"]
AmpDtype: TypeAlias = Literal["bfloat16", "float16"]
Preset: TypeAlias = Literal["training", "inference", "memory_efficient", "high_throughput", "debug"]
Gradient: TypeAlias = Literal["None", "Full"] | Checkpointed | Accumulated
Parallelism: TypeAlias = (
    Literal["None", "Automatic"] | DataParallel | ModelParallel | PipelineParallel
)


def number_of(variant: Variant) -> int:
    """Return the number in a setting such as Accumulated(4) or PipelineParallel(2)."""
    match variant:
        case Checkpointed(number) | Accumulated(number):
            return number
        case DataParallel(number) | ModelParallel(number) | PipelineParallel(number):
            return number


GradientField: TypeAlias = Annotated[
    Gradient,
    OneKey({"Checkpointed": Checkpointed, "Accumulated": Accumulated}, words=("None", "Full")),
]
ParallelismField: TypeAlias = Annotated[
    Parallelism,
    OneKey(
        {
            "DataParallel": DataParallel,
            "ModelParallel": ModelParallel,
            "PipelineParallel": PipelineParallel,
        },
        words=("None", "Automatic"),
    ),
]

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "training": {
        "mode": "Lazy",
        "gradient": "Full",
        "precision": "Single",
        "memory": "Pooled",
        "parallelism": "Automatic",
        "fusion": True,
        "profiling": True,
    },
    "inference": {
        "mode": "Eager",
        "gradient": "None",
        "precision": "Single",
        "memory": "Cached",
        "parallelism": "Automatic",
        "fusion": True,
        "profiling": False,
    },
    "memory_efficient": {
        "mode": "Hybrid",
        "gradient": Checkpointed(10),
        "precision": "Mixed",
        "memory": "MinimalPeak",
        "parallelism": "None",
        "fusion": False,
        "profiling": False,
    },
    "high_throughput": {
        "mode": "Lazy",
        "gradient": "None",
        "precision": "Single",
        "memory": "Pooled",
        "parallelism": DataParallel(4),
        "fusion": True,
        "profiling": False,
    },
    "debug": {
        "mode": "Eager",
        "gradient": "Full",
        "precision": "Full",
        "memory": "Standard",
        "parallelism": "None",
        "fusion": False,
        "profiling": True,
    },
}


class ExecutionSpec(Section):
    """Settings of how each worker computes. The defaults are the plain way: eager, in the dtypes
    with which the model was built, with all gradients.

    precision: converts the model and its rows: Full to float64, Single to float32, Mixed to float32
    with 16-bit products, Half to float32 that is computed in 16 bits. amp_dtype: the 16-bit type of
    Mixed and Half, by default bfloat16; float16 uses a dynamic loss scale. deterministic: compute
    the same bits each time. preset: a name for defaults of the other fields, which explicit fields
    override; always None in a section that was read.
    """

    mode: Mode = "Eager"
    gradient: GradientField = "Full"
    precision: Precision | None = None
    amp_dtype: AmpDtype | None = None
    memory: MemoryStrategy = "Standard"
    parallelism: ParallelismField = "None"
    fusion: bool = False
    profiling: bool = False
    deterministic: bool = True
    preset: Preset | None = None

    @model_validator(mode="before")
    @classmethod
    def _dissolve_preset(cls, value: object) -> object:
        name = value.get("preset") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(name, str) or name not in PRESETS:
            return value  # what is wrong with it is found field by field
        return {**PRESETS[name], **{key: item for key, item in value.items() if key != "preset"}}

    @rule
    def _sixteen_bits(self) -> Iterator[Violation]:
        if self.amp_dtype is not None and self.precision not in ("Mixed", "Half"):
            text = f"belongs to precision Mixed and Half; it is {self.precision or 'not set'}"
            yield Violation("amp_dtype", text)

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with these fields set, validated as a whole; a preset sets its fields."""
        return super().with_changes(**{**PRESETS.get(changes.get("preset", ""), {}), **changes})

    @property
    def computes_gradients(self) -> bool:
        """Return whether the model is trained, not only run."""
        return self.gradient != "None"

    @property
    def checkpoint_interval(self) -> int | None:
        """Return how many blocks apart activations are kept; None: all are kept."""
        return self.gradient.interval if isinstance(self.gradient, Checkpointed) else None

    @property
    def accumulation_steps(self) -> int | None:
        """Return the number of micro-batches per shard; None without gradient accumulation."""
        return self.gradient.steps if isinstance(self.gradient, Accumulated) else None

    @property
    def num_workers(self) -> int:
        """Return the requested number of workers; for Automatic one per core, up to 8."""
        match self.parallelism:
            case "None":
                return 1
            case "Automatic":
                return min(available_cores(), MAX_LOCAL_WORKERS)
            case variant:
                return number_of(variant)

    def summary(self) -> str:
        """Return the section as text for people: a heading and seven lines."""
        lines = {
            "Mode": self.mode,
            "Gradient": _text(self.gradient),
            "Precision": self.precision or "that of the model",
            "Memory": self.memory,
            "Parallelism": _text(self.parallelism),
            "Fusion": str(self.fusion).lower(),
            "Profiling": str(self.profiling).lower(),
        }
        return "\n".join(["Execution:", *(f"  {name}: {text}" for name, text in lines.items())])


def _text(value: Gradient | Parallelism) -> str:
    if isinstance(value, str):
        return value
    field = next(iter(value.__pydantic_fields__))
    return f"{type(value).__name__} {{ {field}: {number_of(value)} }}"


# ---- Accumulation ----
#
# The section `accumulation`: in what portions the rows of one optimizer step are computed.
#
# `batch_size` stays the rows of one step. Each worker's share of it (a logical shard, a gossip
# node's or a federated client's batch) is cut into micro-batches, whose gradients are added in
# order and divided once by their total weight, so the cut changes memory and rounding, but not the
# step.


class AccumulationSpec(Section):
    """Settings of gradient accumulation. A worker's share of a batch is computed at once unless one
    of the first two fields cuts it into micro-batches.

    micro_batch_size: the rows of each micro-batch, of which the last may have fewer. steps: the
    number of micro-batches per full share; their sizes differ by at most one. normalize: "mean"
    divides the sum of the gradients by the weight, "sum" does not. non_finite: what happens to a
    step whose loss or gradient is not finite.
    """

    micro_batch_size: Count | None = None
    steps: Count | None = None
    normalize: Literal["mean", "sum"] = "mean"
    non_finite: Literal["fail", "skip_step"] = "fail"

    @rule
    def _one_way_to_cut(self) -> Iterator[Violation]:
        if self.micro_batch_size is not None and self.steps is not None:
            yield Violation("steps", "micro_batch_size is set already; only one of the two may be")

    @property
    def must_divide(self) -> bool:
        """Return whether the gradients added up over a step are divided by their total weight."""
        return self.normalize == "mean"

    @property
    def may_skip(self) -> bool:
        """Return whether a step that is not finite is left out, rather than ending the run."""
        return self.non_finite == "skip_step"

    def cut(self, num_rows: int) -> tuple[range, ...]:
        """Cut a share of `num_rows` rows into micro-batches, in order; none is empty."""
        size = self.micro_batch_size
        if size is None:
            return split_rows(num_rows, min(self.steps or 1, num_rows)) if num_rows else ()
        return tuple(
            range(first, min(first + size, num_rows)) for first in range(0, num_rows, size)
        )
