"""Simulate training steps of one worker with fake tensors, to see how much memory they hold.

The engine itself is run, so that the memory is that of a real run: gradient buckets, copies of
buffers, temporaries of the optimizer. Fake tensors take shapes from one row of the real data and
need no memory. The module does not know the purpose of an estimate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stratagem.common.compression import TensorLayout
from stratagem.common.job import JobSpec
from stratagem.common.strategy import (
    DataParallel,
    fewest_mirrored,
    local_steps_of,
    partitions_parameters,
    partitions_state,
)
from stratagem.tools.memory.live_bytes import LiveBytes
from stratagem.worker.data.datasets import Dataset, Gather, map_tensors
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.engine import LocalStepsTrainer, state_format
from stratagem.worker.engine.build import make_setup
from stratagem.worker.engine.gathered_blocks import divide_parameters
from stratagem.worker.engine.local_steps import OUTER
from stratagem.worker.engine.setup import Setup
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.exchange.all_reduce import WINDOW, cut_pieces, prepare
from stratagem.worker.exchange.buckets import NUM_WINDOWS, GradientBuckets
from stratagem.worker.exchange.layout import (
    BUCKET_BYTES,
    LENT_BUCKET_BYTES,
    BucketLayout,
    ShardOwners,
    num_sets,
    plan_layout,
    plan_step,
)
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.slice_owners import divide_slices
from stratagem.worker.exchange.sliced_reducer import FragmentExchange
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.models.build import build_model, build_shapes
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.model import layers_of, make_gather
from stratagem.worker.objectives.step_function import make_objective
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Site of the job ----
#
# The site says what may be imported, and has the job's data and the kind of device.


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a simulated job would run: importable code, data sources, and the kind of
    device. It keeps the data of the last job, for further questions about it."""

    entrypoints: EntryPoints
    device: torch.device
    sources: DataSources
    _loaded: list[tuple[JobSpec, dict[str, Dataset]]] = field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def data_of(self, job: JobSpec) -> dict[str, Dataset]:
        """Return the job's data, keyed by split; reused if the last job loads the same data."""
        if not self._loaded or not _loads_alike(job, *self._loaded[0]):
            self._loaded.clear()  # before there are two of them in memory
            self._loaded.append((job, load_data(job, self.entrypoints, self.sources)))
        return dict(self._loaded[0][1])


def _loads_alike(job: JobSpec, known: JobSpec, data: dict[str, Dataset]) -> bool:
    """Return True if both jobs load the same data. data: the data of `known`. Streams depend on
    more fields, so with streams the jobs must be equal."""
    if any(isinstance(dataset, StreamDataset) for dataset in data.values()):
        return job == known
    return _read_by_loading(job) == _read_by_loading(known)


def _read_by_loading(job: JobSpec) -> tuple[Any, ...]:
    """Return the parts of a job that decide which rows are loaded, or whether they are refused."""
    execution = job.execution
    return (
        *(job.data, job.partition, job.seed, job.only_evaluates, job.evaluation),
        *(execution.deterministic, execution.memory),
    )


# ---- Played step ----

CUBLAS_BYTES: Final = 8_519_680
"""The default size of torch's cuBLAS workspace; from Hopper on 32 MiB."""
HOPPER: Final = (9, 0)
NUM_ROUNDS: Final = 2
"""The number of simulated rounds: the first creates what is kept from step to step; the second
holds it from the start."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory that a simulation found: bytes on one worker's device, except for num_ fields."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    before_backward: int
    """The most bytes that were live when a backward pass began."""
    peak: int
    num_parameters: int
    state: int
    """The size of the state that each commit copies: parameters, buffers, optimizer state."""
    layout: tuple[TensorLayout, ...] = ()
    """The names and shapes of the trained tensors."""
    momentum: int = 0
    """The part of `optimizer` that belongs to the outer optimizer, if replicas take local steps."""
    sums: int = 0
    """The part of `gradients` that is exchanged, including buffers for receiving."""
    flops: int = 0
    """The operations of products, convolutions and attention, if only forward was simulated."""
    num_rows: int = 0
    """The number of rows of the split, if only forward was simulated."""
    output_bytes_per_row: int = 0
    """The size of the model's outputs per row, if only forward was simulated."""


def load_rows(job: JobSpec, site: Site) -> dict[str, Dataset]:
    """Return the job's data sets, keyed by split; in place of a stream its first batch."""
    data = site.data_of(job)
    return {
        split: dataset.head(job.batch_size) if isinstance(dataset, StreamDataset) else dataset
        for split, dataset in data.items()
    }


def play_training(job: JobSpec, site: Site, party: ShardOwners) -> Reading:
    """Simulate the first rounds of the party's first member; return the memory that it holds."""
    data = load_rows(job, site)
    gather = gather_shapes(job, site, data)
    # Whole batches only: the last one of an epoch may be short.
    num_rows = min(job.batch_size, len(data["train"]))
    short = shortened(job, NUM_ROUNDS)
    played = short.altered(batch_size=num_rows, data=job.data.with_changes(order=None))
    num_batches = NUM_ROUNDS if short is job else 1
    batches = {**data, "train": ShapedRows(num_batches * num_rows)}
    live = LiveBytes(site.device)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model = build_shapes(job, site.entrypoints, device=site.device)
        gather = gather.fitted(job, model)
        setup = make_setup(played, site.entrypoints, model, batches, gather)
        build = partial(build_shapes, job, site.entrypoints, device=site.device)
        trainer, replicas = make_trainer(setup, party, build)
        parameters = live.size_of(p for each in (model, *replicas) for p in each.parameters())
        cached = hold_cached(job, data, gather)
        buffers = live.live - parameters
        exchange, received = exchange_alone(trainer, party)
        sums = live.live - buffers - parameters
        for _ in range(NUM_ROUNDS):
            live.forget_peak()
            play(trainer, exchange, party)
        own = live.size_of(
            p.grad for each in replicas for p in each.parameters() if p.grad is not None
        )
        peak, before_backward = live.peak, live.before_backward
        optimizer, momentum, state = _read_state(trainer, live)
        del received, cached
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    reading = Reading(
        parameters=parameters,
        buffers=buffers,
        gradients=sums + own,
        optimizer=optimizer,
        # The replica whose turn it is has dropped its gradients by then.
        before_backward=before_backward + own // max(1, len(replicas)),
        peak=peak,
        num_parameters=sum(param.numel() for param in model.parameters()),
        state=state,
        layout=tuple(TensorLayout(name, tuple(param.shape)) for name, param in trained),
        momentum=momentum,
        sums=sums,
    )
    if isinstance(trainer, Trainer) and partitions_state(job.strategy):
        return _divided(reading, trainer, party)
    return reading


def make_trainer(
    setup: Setup, party: ShardOwners, build: Callable[[], nn.Module]
) -> tuple[Trainer | LocalStepsTrainer, Sequence[nn.Module]]:
    """Return the trainer of the party's first member, and the extra replicas that it trains. build:
    makes the model of a replica."""
    if local_steps_of(setup.job.strategy) is None:
        return Trainer(setup), ()
    replicas = {number: build() for number in party.owned}
    for replica in replicas.values():
        setup.callbacks.built(replica)
    return LocalStepsTrainer(setup, replicas), [*replicas.values()]


def exchange_alone(
    trainer: Trainer | LocalStepsTrainer, party: ShardOwners
) -> tuple[Any, list[object]]:
    """Return a gradient exchange that sums only the member's own gradients, and the buffers in
    which it would receive partial sums from other machines."""
    if isinstance(trainer, Trainer):
        buckets = [GradientBuckets(trainer.params, num_extras=trainer.num_extras)]
        compressor = trainer.compressor
    else:
        buckets, compressor = [fragment.buckets for fragment in trainer.fragments], None
    for each in buckets:
        each.tensors(num_sets(party) - 1)
    received = [_receive_buffers(each, party) for each in buckets]
    reducers = [GradientReducer(each, party, SoloTransport(), compressor) for each in buckets]
    return reducers[0] if isinstance(trainer, Trainer) else FragmentExchange(reducers), received


def _receive_buffers(buckets: GradientBuckets, party: ShardOwners) -> object:
    if party.size == 1:
        return None
    step = plan_step(party, party.num_shards)
    sets = [buckets.tensors(index) for index in range(num_sets(party))]
    return prepare(cut_pieces(buckets.layout, party.size), party, step, sets, WINDOW)


def shortened(job: JobSpec, num_rounds: int) -> JobSpec:
    """Return the job with rounds of local steps as short as they can be with the same order of
    events. It has more steps than num_rounds rounds, since the last step of a run joins all
    fragments at once."""
    strategy = job.strategy
    if not isinstance(strategy, DataParallel) or local_steps_of(strategy) is None:
        return job
    overlap = min(1, strategy.options.overlap_steps)
    num_steps = strategy.options.fragments * (1 + overlap)
    options = replace(
        strategy.options,
        local_steps=num_steps,
        overlap_steps=overlap,
        mix=strategy.options.mixed_share,
        outer_bits=None,
    )
    steps = num_rounds * num_steps + 1
    return job.altered(strategy=replace(strategy, options=options), steps=steps, epochs=None)


def play(trainer: Trainer | LocalStepsTrainer, exchange: Any, party: ShardOwners) -> None:
    """Make the training steps of one round: one step, or local steps up to a join of replicas."""
    for _ in range(local_steps_of(trainer.setup.job.strategy) or 1):
        trainer.train_step(exchange, party.owned, party.num_shards)


def _read_state(trainer: Trainer | LocalStepsTrainer, live: LiveBytes) -> tuple[int, int, int]:
    """Return three sizes in bytes: the optimizer's state, the outer momentum in it, and a copy of
    the whole state, which includes sums under way, as at the end of a segment."""
    if isinstance(trainer, Trainer):
        values = chain.from_iterable(each.values() for each in trainer.optimizer.state.values())
        kept = [value for value in values if isinstance(value, Tensor)]
        whole = [*trainer.model.parameters(), *trainer.model.buffers(), *kept]
        return live.size_of(kept), 0, live.size_of(whole)
    for fragment in trainer.fragments:
        fragment.arrive(trainer.step)
    tensors, _ = trainer.live_state()
    momentum = live.size_of(t for name, t in tensors.items() if name.startswith(OUTER))
    inner = live.size_of(t for n, t in tensors.items() if f"/{state_format.OPTIMIZER}" in n)
    return inner + momentum, momentum, sum(tensor.nbytes for tensor in tensors.values())


def play_forward(job: JobSpec, site: Site, num_rows: int) -> Reading:
    """Run the model without gradients on num_rows simulated rows; return the memory held."""
    data = load_rows(job, site)
    gather = gather_shapes(job, site, data)
    live = LiveBytes(site.device)
    with FakeTensorMode(allow_non_fake_inputs=True), live, torch.no_grad():
        model = build_shapes(job, site.entrypoints, device=site.device).eval()
        gather = gather.fitted(job, model)
        parameters = live.size_of(model.parameters())
        cached = hold_cached(job, data, gather) if job.only_evaluates else None
        buffers = live.live - parameters
        live.forget_peak()
        x, y = gather(data[_split(job)], torch.arange(num_rows), "running the model")
        objective = make_objective(job, site.entrypoints)
        with FlopCounterMode(display=False) as counter:
            found = objective.evaluate(model, x, y, num_rows, wants_output=True)
        outputs = [leaf for leaf in tree_leaves(found.output) if isinstance(leaf, Tensor)]
        state = live.size_of([*model.parameters(), *model.buffers()])
        del cached
    return Reading(
        parameters=parameters,
        buffers=buffers,
        gradients=0,
        optimizer=0,
        before_backward=live.peak,
        peak=live.peak,
        flops=counter.get_total_flops(),
        num_rows=len(data[_split(job)]),
        output_bytes_per_row=sum(tensor.nbytes for tensor in outputs) // num_rows,
        num_parameters=sum(param.numel() for param in model.parameters()),
        state=state,
    )


def library_workspace(device: torch.device) -> int:
    """Return the bytes that torch reserves for GPU libraries, whatever the model."""
    if device.type != "cuda":
        return 0
    is_large = torch.cuda.get_device_capability(device) >= HOPPER
    return 32 << 20 if is_large else CUBLAS_BYTES


@dataclass(frozen=True, slots=True)
class ShapedRows:
    """A data set that has a number of rows, but no values; for simulations."""

    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        raise NotImplementedError("rows of a played step have no values")


@dataclass(frozen=True)
class ShapesOnly(Gather):
    """A gatherer of rows with the right shapes and types, but no values; for fake tensors."""

    x: Any
    y: Any

    def fitted(self, job: JobSpec, model: nn.Module) -> "ShapesOnly":
        """Return a copy that makes rows of the dtype that the model expects."""
        return replace(self, dtype=rows_dtype(job, model))

    def __call__(
        self, dataset: Dataset, indices: Tensor, activity: str, keys: BatchKeys | None = None
    ) -> tuple[Any, Any]:
        def rows(row: Tensor) -> Tensor:
            shape = (len(indices), *row.shape[1:])
            return torch.empty(shape, dtype=self._dtype_of(row), device=self.device)

        x = map_tensors(self.x, rows)
        return x, x if self.y is self.x else map_tensors(self.y, rows)


def hold_cached(job: JobSpec, data: Mapping[str, Dataset], gather: Gather) -> object:
    """Return the data sets that the job caches on the device; None if it caches none."""
    if job.execution.memory != "Cached":
        return None
    used = {_split(job), *([job.evaluation.split] if job.evaluation is not None else [])}
    return [
        gather(dataset, torch.arange(len(dataset)), "caching data sets")
        for split, dataset in data.items()
        if split in used
    ]


def _split(job: JobSpec) -> str:
    """Return the name of the split whose rows the job passes through the model."""
    return job.evaluation.split if job.only_evaluates and job.evaluation else "train"


def gather_shapes(job: JobSpec, site: Site, data: Mapping[str, Dataset]) -> ShapesOnly:
    """Read one row, and return a gatherer of rows with the same shapes and dtypes. Call this where
    tensors are real."""
    x, y = Gather(None, torch.device("cpu"))(data[_split(job)], torch.arange(1), "reading one row")
    return ShapesOnly(None, site.device, x, y)


# ---- Divided state ----

_NUM_UNDER_WAY = 2
"""The number of gradient buckets that backward is filling, or that wait to be exchanged."""


def _divided(reading: Reading, trainer: Trainer, party: ShardOwners) -> Reading:
    """Return the memory of the member with the largest slice, if members divide the optimizer's
    state or the whole state. reading: the memory of a member that holds everything."""
    job, is_cpu = trainer.job, trainer.setup.gather.device.type == "cpu"
    is_full, fewest = partitions_parameters(job.strategy), fewest_mirrored(job.strategy)
    shapes = [(name, param.dtype, param.shape) for name, param in trainer.params]
    bucket_bytes = LENT_BUCKET_BYTES if is_full and party.size > 1 else BUCKET_BYTES
    layout = plan_layout(shapes, num_extras=trainer.num_extras, bucket_bytes=bucket_bytes)
    is_mirrored = fewest is not None and party.size >= fewest
    share = _largest_share(layout, party.size, is_mirrored=is_mirrored)
    optimizer = round(reading.optimizer * (1.0 - share))
    uncopied = round(sum(param.nbytes for _, param in trainer.params) * (1.0 - share))
    parameters = gradients = 0
    if is_full:
        parameters = _saved_parameters(trainer, share)
    if is_full and party.size > 1 and is_cpu:
        gradients = _saved_gradients(layout, job, party, share)
    away = optimizer + parameters + gradients
    return replace(
        reading,
        parameters=reading.parameters - parameters,
        gradients=reading.gradients - gradients,
        optimizer=reading.optimizer - optimizer,
        before_backward=reading.before_backward - away,
        peak=reading.peak - away,
        state=reading.state - optimizer - uncopied,
    )


def _largest_share(layout: BucketLayout, size: int, *, is_mirrored: bool) -> float:
    """Return the largest share of the trained elements that a member holds: its own slice and, with
    mirrors, that of the previous member."""
    owners = divide_slices(layout, size)
    owned = [sum(part.stop - part.first for part in own) for own in owners.parts]
    held = owned
    if is_mirrored:
        held = [own + owned[owners.mirrored_rank(rank)] for rank, own in enumerate(owned)]
    return max(held) / max(1, sum(owned))


def _saved_parameters(trainer: Trainer, share: float) -> int:
    """Return the bytes of parameters that a member saves by holding this share and gathering the
    others a block at a time; negative if it needs more."""
    params = [param for _, param in trainer.params]
    rest, *blocks = divide_parameters(params, layers_of(trainer.model))
    gathered = _nbytes(rest.params) + max((_nbytes(each.params) for each in blocks), default=0)
    trained = _nbytes(params)
    return trained - round(share * trained) - gathered


def _saved_gradients(layout: BucketLayout, job: JobSpec, party: ShardOwners, share: float) -> int:
    """Return the bytes of gradients that a member with this share saves by freeing buckets during
    the step. With several micro-batches or shards, all buckets stay in memory."""
    rows = -(-job.batch_size // party.num_shards)
    is_one_pass = len(party.owned) == 1 and len(job.window.cut(rows)) == 1
    sizes = [bucket.size_bytes for bucket in layout.buckets[:-1]]
    widest, whole, sets = max(sizes, default=0), sum(sizes), num_sets(party)
    under_way = min(whole, _NUM_UNDER_WAY * widest) if is_one_pass else sets * whole
    held = round(share * whole) + NUM_WINDOWS * widest * sets + under_way
    return sets * whole - held


def _nbytes(params: Sequence[nn.Parameter]) -> int:
    return sum(param.nbytes for param in params)


# ---- Measured steps ----
#
# The peak is that of real steps: those that are otherwise played with fake tensors, by the same
# engine on the job's own rows.

MAX_ROUNDS: Final = 32
"""The largest number of measured rounds: enough for a float16 loss scale to come down."""


def measure_training(job: JobSpec, site: Site, party: ShardOwners) -> int:
    """Make the simulated steps for real; return the peak of bytes of torch's allocator."""
    data = site.data_of(job)
    if site.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(site.device)
        before = torch.cuda.memory_allocated(site.device)
        _play_for_real(job, site, data, party)
        return torch.cuda.max_memory_allocated(site.device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        held = _play_for_real(job, site, data, party)
    del held
    return _peak_of(recorded)


def _play_for_real(
    job: JobSpec, site: Site, data: dict[str, Dataset], party: ShardOwners
) -> object:
    """Make the rounds for real; return the objects that hold memory to the end."""
    # First steps may change nothing because the loss is still scaled too far.
    may_skip = job.execution.precision in ("Mixed", "Half") and job.execution.amp_dtype == "float16"
    num_rounds = MAX_ROUNDS if may_skip else NUM_ROUNDS
    model = build_model(job, site.entrypoints, device=site.device, fresh=True)
    gather = make_gather(job, model, site.device)
    setup = make_setup(shortened(job, num_rounds), site.entrypoints, model, data, gather)
    build = partial(build_model, job, site.entrypoints, device=site.device, fresh=False)
    trainer, _ = make_trainer(setup, party, build)
    if isinstance(trainer, LocalStepsTrainer):
        trainer.load_state(state_format.model_state(model), state_format.state_metadata(0))
    exchange, received = exchange_alone(trainer, party)
    for number in range(1, num_rounds + 1):
        has_state = isinstance(trainer, Trainer) and trainer.optimizer.state
        play(trainer, exchange, party)
        if number >= NUM_ROUNDS and has_state:
            break
    del received
    return trainer, exchange


def _peak_of(recorded: profile) -> int:
    """Return the peak, over time, of the bytes allocated minus the bytes freed."""
    assert recorded.profiler is not None
    results = recorded.profiler.kineto_results
    assert results is not None
    changes = sorted(
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]  # the stub lacks it
        for event in results.events()
        if event.name() == "[memory]"
    )
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak
