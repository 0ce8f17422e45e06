"""Estimate the memory of one worker of a job, by simulating its steps with fake tensors.

An estimate is of the worker that needs most. The estimate divides what the strategy really divides:
data parallelism the rows, a pipeline the layers, accumulation the rows of a pass.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import counted
from stratagem.common.compression import TensorLayout
from stratagem.common.job import CompressionSpec, JobSpec, exchanged_codec
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.strategy import (
    Custom,
    DataParallel,
    Decentralized,
    Federated,
    FedProx,
    Local,
    ModelParallel,
    ParameterServer,
    PopulationBased,
    Strategy,
    local_steps_of,
    partitions_state,
)
from stratagem.common.strategy.strategies import workers_used
from stratagem.tools.memory.play import (
    Reading,
    Site,
    library_workspace,
    measure_training,
    play_forward,
    play_training,
)
from stratagem.tools.memory.strategies import (
    NodeCopies,
    codec_memory,
    coded_copies,
    num_copied,
    num_known,
    num_received,
    outer_messages,
    plain_copies,
    play_stages,
)
from stratagem.worker.exchange.layout import ShardOwners
from stratagem.worker.plans.build import check_supported
from stratagem.worker.session.states import NUM_SNAPSHOTS

# ---- Memory of a step ----
#
# The memory of a step is divided by purpose, and shown as a table for people.

_PARTS: Final = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers")


@dataclass(frozen=True, slots=True)
class StepMemory:
    """An estimate of one worker's device memory in a training step, in bytes; six parts add up to
    `total`.

    gradients: all buckets, and the buffers of the exchange. activations: the batch, and what
    forward keeps for backward. workspace: temporary memory at the peak. buffers: those of the model
    with the engine's copies, and kept predictions. snapshot: one copy of the state at a commit, in
    host memory; num_snapshots: how many are kept at a time. received: one state from which clients
    of a federation begin, in host memory; num_received: how many are kept at a time. num_copied:
    the number of updates of that size that are copied for a coordinator on the same machine. rows:
    the rows that pass through the model together. measured: the peak of a real step, if one was
    made; the workspace then includes the unexplained rest.
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
    """The names and shapes of the trained tensors, if a single party trains them."""
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in _PARTS)

    @property
    def needed(self) -> int:
        """Return the bytes needed of the device's memory; on a CPU this includes snapshots and
        received states."""
        of_clients = (self.num_received + self.num_copied) * self.received
        states = self.num_snapshots * self.snapshot + of_clients
        return self.total + (states if self.device == "cpu" else 0)

    @property
    def calibrated_by(self) -> str:
        """Return the words "a measured step" if a step was measured, else ""."""
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
    """Format a size for people, in binary units."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_of(reading: Reading, site: Site, rows: int, notes: tuple[str, ...]) -> StepMemory:
    """Convert the memory found by a simulated step to an estimate; rows: those that pass through
    the model together."""
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
    """Add memory to the estimate that is needed only while no activations are held."""
    more = num_bytes - estimate.activations - estimate.workspace
    return replace(estimate, workspace=estimate.workspace + max(0, more))


# ---- Memory estimate ----


def estimate_memory(
    job: JobSpec,
    site: Site,
    *,
    num_workers: int | None = None,
    inference: bool = False,
    measure: bool = False,
) -> StepMemory:
    """Estimate the memory of the worker that needs most.

    num_workers: that share the job; by default as many as its strategy has room for. inference:
    only run the model, over the batch of one step, as a job that trains nothing does. measure: make
    a real step here, too. execution.parallelism must be a strategy by now: see `resolve`.

    Raises InvalidInputError for a job that workers refuse, UserCodeError for errors of the user's
    code.
    """
    if num_workers is not None and num_workers < 1:
        raise InvalidInputError.at("num_workers", f"{num_workers} is not 1 or more")
    if measure and job.only_evaluates:
        text = "only training steps are measured, and execution.gradient is None"
        raise InvalidInputError.at("measure", text)
    check_supported(job.execution)
    # Compiled code keeps no more for backward than the same code not compiled.
    execution = job.execution.with_changes(mode="Eager", profiling=False)
    # Codecs and predictions work on values, which a played step does not have.
    played = job.altered(execution=execution, compression=None, phases=None)
    if inference or job.only_evaluates:
        return _running(played, site, num_workers)
    estimate = _training(played, site, job.strategy, num_workers)
    if measure:
        estimate = _calibrated(played, site, estimate)
    kept = replace(
        estimate,
        num_snapshots=_num_snapshots(job),
        num_received=num_received(job, estimate.received),
        num_copied=num_copied(job, estimate.received),
    )
    found = _with_phases(job, _with_codec(job, kept, num_workers))
    most = workers_used(job.strategy)
    if num_workers is None or num_workers <= most or isinstance(job.strategy, Custom):
        return found
    note = f"of {counted(num_workers, 'worker')} the strategy has work for {most}"
    return replace(found, notes=(*found.notes, note))


def _num_snapshots(job: JobSpec) -> int:
    """Return the number of snapshots of its state that a worker keeps: one for a client (its
    update), or if the run is a single segment."""
    has_segments = job.checkpoint.every is not None or job.evaluation is not None
    return NUM_SNAPSHOTS if has_segments and not isinstance(job.strategy, Federated) else 1


def _running(job: JobSpec, site: Site, num_workers: int | None) -> StepMemory:
    """Estimate a job that only runs the model, including predictions that are kept to the end."""
    reading = play_forward(job, site, job.batch_size)
    estimate = memory_of(reading, site, job.batch_size, ())
    if isinstance(job.strategy, ModelParallel):
        note = "the whole model on one worker; a stage holds its own part"
        return replace(estimate, notes=(note,))
    if job.evaluation is None or not (job.only_evaluates and job.evaluation.predictions):
        return estimate
    num_replicas = job.strategy.num_replicas if isinstance(job.strategy, DataParallel) else 1
    num_batches = math.ceil(reading.num_rows / job.batch_size)
    own = math.ceil(num_batches / min(num_workers or num_replicas, num_replicas))
    num_bytes = min(reading.num_rows, own * job.batch_size) * reading.output_bytes_per_row
    if estimate.device != "cpu":
        note = f"{text_of(num_bytes)} of predictions are in host memory, which is not in it"
        return replace(estimate, notes=(*estimate.notes, note))
    return replace(estimate, buffers=estimate.buffers + num_bytes)


def _training(job: JobSpec, site: Site, strategy: Strategy, num_workers: int | None) -> StepMemory:
    match strategy:
        case DataParallel(num_replicas, Decentralized(topology=topology)):
            num_members = min(num_workers or num_replicas, num_replicas)
            return _gossip(job, site, topology, num_replicas, num_members)
        case DataParallel() if local_steps_of(strategy) is not None:
            return _apart(job, site, strategy, num_workers)
        case DataParallel(num_replicas, aggregation, options):
            rows = _pieces(job, num_replicas)
            if isinstance(options.inner, ModelParallel):
                return _pipeline(job, site, options.inner, rows)
            party = _party(strategy, num_workers)
            estimate = _of_party(job, site, party)
            if party.size > 1 and isinstance(aggregation, ParameterServer):
                # The sums are staged next to the buckets.
                received = max(4, _dtype_of(estimate).itemsize) * estimate.num_parameters
                return replace(estimate, gradients=estimate.gradients + received)
            return estimate
        case ModelParallel():
            return _pipeline(job, site, strategy, job.batch_size)
        case Federated(options=options):
            estimate = _training(job, site, options.inner or Local(), num_workers)
            if options.inner is None:  # an update, and what it is an update of, has no optimizer
                of_model = estimate.snapshot - estimate.optimizer
                estimate = replace(estimate, received=of_model)
            return _of_client(strategy, estimate, _dtype_of(estimate).itemsize)
        case PopulationBased(options=options):
            return _training(job, site, options.inner or Local(), num_workers)
        case Custom():
            note = "the strategy is a plug-in's: this is what one worker alone would need"
            return replace(_of_party(job, site, ShardOwners(0, 1, 1)), notes=(note,))
        case Local():
            return _of_party(job, site, ShardOwners(0, 1, 1))


def _of_client(strategy: Federated, estimate: StepMemory, item_bytes: int) -> StepMemory:
    """Add the memory that a federated client needs to correct its gradients (FedProx, SCAFFOLD)."""
    if strategy.options.control is not None:
        return _controlled(estimate, item_bytes)
    if not isinstance(strategy.aggregation, FedProx):
        return estimate
    # The proximal term pulls towards the round's parameters, which are kept.
    return replace(estimate, parameters=2 * estimate.parameters)


def _controlled(estimate: StepMemory, item_bytes: int) -> StepMemory:
    """Add the control variates of a SCAFFOLD client. While training: the common one, the client's
    own, their difference, and its copy on the device. After the last step: the new one, and its
    change, which is sent with the update."""
    variate = item_bytes * sum(each.numel for each in estimate.layout)
    note = f"{text_of(variate)} of each control variate: common, own, difference, and its copy"
    num_held = 4
    if estimate.device != "cpu":
        note += ", of which the copy alone is on the device and in it"
        num_held = 1
    held = replace(
        estimate,
        gradients=estimate.gradients + num_held * variate,
        snapshot=estimate.snapshot + variate,
        notes=(*estimate.notes, note),
    )
    return with_moment(held, 2 * variate) if estimate.device == "cpu" else held


def _dtype_of(estimate: StepMemory) -> torch.dtype:
    """Return the narrowest of three dtypes that is as wide as the parameters are on average."""
    average = estimate.parameters / max(1, estimate.num_parameters)
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    return next((each for each in dtypes if average <= each.itemsize), torch.float64)


def _with_codec(job: JobSpec, estimate: StepMemory, num_workers: int | None) -> StepMemory:
    """Add the memory of the codec: for each of the worker's shards, the state before and after the
    step, and the message; and temporarily the scratch memory for coding one shard."""
    spec = exchanged_codec(job.compression, job.strategy)
    if spec is None:
        return estimate
    if isinstance(job.strategy, DataParallel) and local_steps_of(job.strategy) is not None:
        return _with_outer_messages(job.strategy, estimate, spec, num_workers)
    if isinstance(job.strategy, DataParallel) and isinstance(
        job.strategy.aggregation, Decentralized
    ):
        return estimate  # with the copies of nodes, see `_gossip`
    if estimate.device != "cpu":
        note = "the codec works in host memory, or in scratch on the device that is not in it"
        estimate = replace(estimate, notes=(*estimate.notes, note))
    num_shards = job.strategy.num_replicas if isinstance(job.strategy, DataParallel) else 1
    num_owned = math.ceil(num_shards / min(num_workers or num_shards, num_shards))
    codec = codec_memory(
        spec, estimate.layout, with_feedback=not isinstance(job.strategy, Federated)
    )
    held = num_owned * (2 * codec.state + codec.payload)
    if estimate.device != "cpu":
        held, codec = num_owned * 2 * codec.state, replace(codec, scratch=0)
    kept = replace(estimate, gradients=estimate.gradients + held)
    return with_moment(kept, codec.scratch)


def _with_outer_messages(
    strategy: DataParallel, estimate: StepMemory, spec: CompressionSpec, num_workers: int | None
) -> StepMemory:
    """Add the memory of coded outer gradients (changes of replicas with local steps); with an
    overlap they are held while training goes on."""
    num_own = len(_party(strategy, num_workers).owned)
    options = strategy.options
    need = outer_messages(spec, estimate.layout, options.fragments, num_own)
    note = f"{text_of(need.messages)} of outer gradients as {spec.codec}"
    if estimate.device != "cpu":
        note = f"{note}, in host memory or in scratch on the device, which are not in it"
        return replace(estimate, notes=(*estimate.notes, note))
    noted = replace(estimate, notes=(*estimate.notes, note))
    if not options.overlap_steps:
        return with_moment(noted, need.messages + need.moment)
    return with_moment(replace(noted, gradients=noted.gradients + need.messages), need.moment)


def _with_phases(job: JobSpec, estimate: StepMemory) -> StepMemory:
    """Add the gradients that phase training keeps: the history, a forecast to test, and the
    gradients of a predicted step."""
    if job.phases is None:
        return estimate
    predictor = job.phases.predictor
    kept = (predictor.history if predictor.kind == "wls" else 2) + 3
    size = max(4, _dtype_of(estimate).itemsize)
    held = size * estimate.num_parameters * kept
    return replace(estimate, gradients=estimate.gradients + held)


def _party(strategy: DataParallel, num_workers: int | None) -> ShardOwners:
    """Return the shards of the first worker; no other worker has more."""
    num_replicas = strategy.num_replicas
    return ShardOwners(0, min(num_workers or num_replicas, num_replicas), num_replicas)


def _of_party(job: JobSpec, site: Site, party: ShardOwners) -> StepMemory:
    rows = rows_of_pass(job, party.num_shards)
    one_pass = _without_accumulation(job, rows * party.num_shards)
    return memory_of(play_training(one_pass, site, party), site, rows, ())


def _without_accumulation(job: JobSpec, batch_size: int) -> JobSpec:
    """Return the job with one pass per step, as all passes use the same buckets: simulating one is
    enough."""
    window = job.window.with_changes(micro_batch_size=None, steps=None)
    execution = job.execution
    if execution.accumulation_steps is not None:
        execution = execution.with_changes(gradient="Full")
    return job.altered(batch_size=batch_size, execution=execution, accumulation=window)


def rows_of_share(job: JobSpec) -> int | None:
    """Return the rows per logical shard, gossip node or client in a batch; None if a pipeline cuts
    them into micro-batches."""
    match job.strategy:
        case ModelParallel():
            return None
        case DataParallel(num_replicas, options=options):
            is_cut = isinstance(options.inner, ModelParallel)
            return None if is_cut else _pieces(job, num_replicas)
        case _:
            return job.batch_size


def rows_of_pass(job: JobSpec, num_shards: int) -> int:
    """Return the largest number of rows that pass through the model at once."""
    return max(map(len, job.window.cut(_pieces(job, num_shards))))


def _pieces(job: JobSpec, num_shards: int) -> int:
    return math.ceil(job.batch_size / num_shards)


def _gossip(
    job: JobSpec, site: Site, topology: str, num_nodes: int, num_members: int
) -> StepMemory:
    """Estimate a worker under gossip: it holds a model for each of its nodes, of which one trains
    at a time, the mean of all models for evaluation, and copies of its nodes and their
    neighbours."""
    rows = _pieces(job, num_nodes)
    one_node = job.altered(batch_size=rows, strategy=Local())
    one = _of_party(one_node, site, ShardOwners(0, 1, 1))
    held = len(assign_shards(num_nodes, num_members)[0])
    known = num_known(topology, num_nodes, num_members, job.seed)
    if job.compression is None or job.compression.codec == "none":
        copies = plain_copies(known, one.layout, _dtype_of(one))
    elif one.device == "cpu":
        copies = coded_copies(known, held, one.layout, job)
    else:  # numpy's
        copies = NodeCopies(known, 0, 0)
    estimate = replace(
        one,
        parameters=(held + 1) * one.parameters,
        gradients=held * one.gradients + copies.held,
        optimizer=held * one.optimizer,
        buffers=held * one.buffers,
        snapshot=held * one.snapshot,
        notes=(
            f"{held} of {num_nodes} nodes, each with a model of its own; copies of {known}, "
            "their neighbours among them",
        ),
    )
    return with_moment(estimate, copies.moment)


def _apart(job: JobSpec, site: Site, strategy: DataParallel, num_workers: int | None) -> StepMemory:
    """Estimate a worker with local steps: it holds parameters and an optimizer per replica, of
    which one works at a time, and the common state with the outer optimizer and its gradients."""
    num_replicas, party = strategy.num_replicas, _party(strategy, num_workers)
    rows, held = rows_of_pass(job, num_replicas), len(party.owned)
    reading = play_training(_without_accumulation(job, rows * num_replicas), site, party)
    common, num_fragments = reading.parameters // (1 + held), strategy.options.fragments
    parts = f" of {num_fragments} fragments" if num_fragments > 1 else ""
    momentum = f"{text_of(reading.momentum)} of outer momentum, " if reading.momentum else ""
    note = (
        f"{held} of {num_replicas} replicas, each with parameters, gradients and an optimizer of "
        f"its own; {text_of(common)} of parameters that they have in common, {momentum}"
        f"{text_of(reading.sums)} of outer gradients{parts}, with room for what is received"
    )
    estimate = memory_of(reading, site, rows, (note,))
    if party.size > 1 and isinstance(strategy.aggregation, ParameterServer):
        # The sums are staged next to the buckets.
        widest = max(4, common // max(1, estimate.num_parameters))
        received = widest * estimate.num_parameters
        estimate = replace(estimate, gradients=estimate.gradients + received)
    return estimate


def _pipeline(job: JobSpec, site: Site, strategy: ModelParallel, rows: int) -> StepMemory:
    """Estimate the worker of the pipeline stage that needs most; the notes list all stages."""
    stages = play_stages(job, site, strategy, rows)
    needs = [memory_of(stage.reading, site, stage.rows, ()) for stage in stages]
    notes = tuple(
        f"{stage.name}: {text_of(need.total)}, {stage.kept}"
        for stage, need in zip(stages, needs, strict=True)
    )
    return replace(max(needs, key=lambda estimate: estimate.total), notes=notes)


def _calibrated(job: JobSpec, site: Site, estimate: StepMemory) -> StepMemory:
    """Correct an estimate's workspace by the peak that real steps were measured to need."""
    if not isinstance(job.strategy, Local | DataParallel) or (
        estimate.notes and local_steps_of(job.strategy) is None
    ):
        raise InvalidInputError.at(
            "strategy", f"a step of {type(job.strategy).__name__} is not measured by one worker"
        )
    if partitions_state(job.strategy):
        text = "one worker alone would hold all of the state that it divides; it is not measured"
        raise InvalidInputError.at("strategy.options.partition_state", text)
    num_shards = job.strategy.num_replicas if isinstance(job.strategy, DataParallel) else 1
    measured = measure_training(job, site, ShardOwners(0, num_shards, num_shards))
    others = estimate.total - estimate.workspace
    return replace(estimate, workspace=max(0, measured - others), measured=measured)
