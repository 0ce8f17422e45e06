"""Gradient accumulation: in what portions the rows of one optimizer step are computed.

`batch_size` stays the rows of one step. Each worker's share of it (a logical shard, a gossip node's
or a federated client's batch) is cut into micro-batches, whose gradients are added in order and
divided once by their total weight, so the cut changes memory and rounding, but not the step.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from stratagem.common.base.errors import Violation
from stratagem.common.numerics.shards import split_rows
from stratagem.common.schema.document import Count, Section
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import ModelParallel, Pipeline

if TYPE_CHECKING:
    from stratagem.common.job.job import JobSpec


class AccumulationSpec(Section):
    """micro_batch_size: rows, the last micro-batch may have fewer; or steps: how many micro-batches
    a full share is cut into, sizes differing by at most one. Without either, a share is computed at
    once. normalize: mean divides by the weight, sum does not. non_finite: what a loss or gradient
    that is no finite number does to its step."""

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
        """Return whether the sum over the window is divided by its weight."""
        return self.normalize == "mean"

    @property
    def may_skip(self) -> bool:
        """Return whether a step that is not finite is left out, rather than ending the run."""
        return self.non_finite == "skip_step"

    def cut(self, num_rows: int) -> tuple[range, ...]:
        """The micro-batches of a share of `num_rows` rows, in order; none is empty."""
        size = self.micro_batch_size
        if size is None:
            return split_rows(num_rows, min(self.steps or 1, num_rows)) if num_rows else ()
        return tuple(
            range(first, min(first + size, num_rows)) for first in range(0, num_rows, size)
        )


def check_accumulation(job: "JobSpec") -> Iterator[Violation]:
    """Yield the contradictions between the section and the rest of the job."""
    spec = job.window
    # That a job lacks its batch_size is another violation.
    for name in ("micro_batch_size", "steps"):
        value = getattr(spec, name)
        if value is not None and job.batch_size is not None and value > job.batch_size:
            what = "micro-batches" if name == "steps" else "rows"
            text = f"{value} {what} is more than batch_size, {job.batch_size}"
            yield Violation(f"accumulation.{name}", text)
    pipeline = _pipeline_of(job.strategy)
    if pipeline is None:
        return
    if spec.steps is not None:
        text = "has no meaning under a Pipeline; its communication.micro_batch_size has"
        yield Violation("accumulation.steps", text)
    if spec.micro_batch_size not in (None, pipeline.micro_batch_size):
        text = (
            f"{spec.micro_batch_size} contradicts the Pipeline's communication.micro_batch_size, "
            f"{pipeline.micro_batch_size}; leave one of the two out"
        )
        yield Violation("accumulation.micro_batch_size", text)


def _pipeline_of(strategy: object) -> Pipeline | None:
    """The pipeline in the strategy, or in the innermost one inside it."""
    while strategy is not None:
        if isinstance(strategy, ModelParallel):
            protocol = strategy.communication
            return protocol if isinstance(protocol, Pipeline) else None
        strategy = getattr(getattr(strategy, "options", None), "inner", None)
    return None
