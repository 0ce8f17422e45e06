"""The memory that one worker needs for a step, by what it is for, and as a table for people."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from stratagem.common.compression import TensorLayout
from stratagem.tools.planning.job_site import Site
from stratagem.tools.planning.simulated_step import Reading, library_workspace

_PARTS: Final = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers")


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on the device of one worker during a training step; the six parts add up to `total`.

    gradients: all buckets, and what the exchange receives into or copies. activations: the batch
    and what forward keeps for backward. workspace: what is there for a moment at the worst one.
    buffers: with the engine's copies of them, and predictions that are kept. snapshot: of the
    state at a commit, in host memory; num_snapshots: that are kept at a time. received: of a state
    that the clients of a federation begin from, there, too; num_received: likewise. num_copied: of
    updates as large, for a coordinator on the same machine. rows: that pass
    through the model together. measured: the peak of a real step, if one was done; the workspace
    then holds what was measured beyond the rest.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    buffers: int
    snapshot: int
    rows: int
    num_parameters: int
    device: str
    measured: int | None = None
    num_snapshots: int = 1
    received: int = 0
    num_received: int = 0
    num_copied: int = 0
    layout: tuple[TensorLayout, ...] = ()
    """What is trained, where one party trains it."""
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in _PARTS)

    @property
    def needed(self) -> int:
        """Return the bytes needed of the device's memory; on a CPU the snapshots and what is
        received are in the same memory."""
        of_clients = (self.num_received + self.num_copied) * self.received
        states = self.num_snapshots * self.snapshot + of_clients
        return self.total + (states if self.device == "cpu" else 0)

    @property
    def calibrated_by(self) -> str:
        """ "a measured step", or "" where nothing was measured."""
        return "a measured step" if self.measured is not None else ""

    def document(self) -> dict[str, Any]:
        """Return the estimate as plain values, for JSON."""
        fields = asdict(self)
        del fields["layout"]
        return {
            **fields,
            "notes": list(self.notes),
            "total": self.total,
            "needed": self.needed,
            "calibrated_by": self.calibrated_by,
        }

    def __str__(self) -> str:
        lines = [f"{name:<12} {text_of(getattr(self, name)):>10}" for name in _PARTS]
        lines.append(f"{'total':<12} {text_of(self.total):>10}  on {self.device}, {self.rows} rows")
        states = [("snapshots", self.snapshot, self.num_snapshots)]
        if self.num_received:
            states.append(("received", self.received, self.num_received))
        if self.num_copied:
            states.append(("copied", self.received, self.num_copied))
        for name, size, number in states:
            kept = f"in host memory, of {text_of(size)} each: {number}"
            lines.append(f"{name:<12} {text_of(number * size):>10}  {kept}")
        lines.append(f"{'needed':<12} {text_of(self.needed):>10}  of the memory of {self.device}")
        return "\n".join(lines)


def text_of(num_bytes: int) -> str:
    """A size for people, in binary units."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_of(reading: Reading, site: Site, rows: int, notes: tuple[str, ...]) -> StepMemory:
    """Return what a played step has shown, with rows that pass through the model together."""
    fixed = reading.parameters + reading.gradients + reading.optimizer + reading.buffers
    # After the last backward the optimizer may need more than the activations did.
    activations = max(0, min(reading.before_backward, reading.peak) - fixed)
    return StepMemory(
        parameters=reading.parameters,
        gradients=reading.gradients,
        optimizer=reading.optimizer,
        activations=activations,
        workspace=max(0, reading.peak - fixed - activations) + library_workspace(site.device),
        buffers=reading.buffers,
        snapshot=reading.state,
        rows=rows,
        num_parameters=reading.num_parameters,
        device=site.device.type,
        layout=reading.layout,
        notes=notes,
    )


def with_moment(estimate: StepMemory, num_bytes: int) -> StepMemory:
    """Add memory that is needed temporarily, at a time when no activations are left."""
    more = num_bytes - estimate.activations - estimate.workspace
    return replace(estimate, workspace=estimate.workspace + max(0, more))
