"""Plays training steps of one worker with fake tensors to see what they hold.

The engine itself is run, so that what it holds is what it will hold: gradient buckets, copies of
buffers, temporaries of the optimizer. Fake tensors take shapes from one row of the real data and
no memory. Must not know what an estimate is for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stratagem.common.compression import TensorLayout
from stratagem.common.job import JobSpec
from stratagem.common.strategy import fewest_mirrored, partitions_parameters, partitions_state
from stratagem.tools.planning.full_slices import FullSavings, full_savings, lent_layout
from stratagem.tools.planning.job_site import Site
from stratagem.tools.planning.live_bytes import LiveBytes
from stratagem.worker.data.datasets import Dataset, Gather, map_tensors
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.engine.build import make_setup
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.exchange.all_reduce import WINDOW, cut_pieces, prepare
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.layout import BucketLayout, ShardOwners, num_sets, plan_step
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.slice_owners import divide_slices
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.models.build import build_shapes
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.objectives.step_function import make_objective

CUBLAS_BYTES: Final = 8_519_680
"""torch's default workspace for matrix products on CUDA, 4 times as much from Hopper on."""
HOPPER: Final = (9, 0)
NUM_STEPS: Final = 2
"""The first step makes the optimizer's state; the second holds it from the start."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes on the device of one worker, but for num_ ones."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    before_backward: int
    """All that was live when a backward began, at most."""
    peak: int
    num_parameters: int
    state: int
    """Of a copy of parameters, buffers and optimizer state, as each commit takes one."""
    layout: tuple[TensorLayout, ...] = ()
    """What is trained."""
    flops: int = 0
    """Where only forward was played: of its matrix products, convolutions and attention."""
    num_rows: int = 0
    """Where only forward was played: of the split."""
    output_bytes_per_row: int = 0
    """Likewise."""


def load_rows(job: JobSpec, site: Site) -> dict[str, Dataset]:
    """Return the job's data by split; of a stream of rows, its first batch."""
    data = site.data_of(job)
    return {
        split: dataset.head(job.batch_size) if isinstance(dataset, StreamDataset) else dataset
        for split, dataset in data.items()
    }


def play_training(job: JobSpec, site: Site, party: ShardOwners) -> Reading:
    """Measure, with fake tensors, what the first steps of a member hold."""
    data = load_rows(job, site)
    gather = gather_shapes(job, site, data)
    # Whole batches only: the last one of an epoch may be short.
    num_rows = min(job.batch_size, len(data["train"]))
    unordered = job.data.with_changes(order=None)
    whole = job.altered(batch_size=num_rows, data=unordered)
    batches = {**data, "train": ShapedRows(NUM_STEPS * num_rows)}
    live = LiveBytes(site.device)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model = build_shapes(job, site.entrypoints, device=site.device)
        gather = gather.fitted(job, model)
        trainer = Trainer(make_setup(whole, site.entrypoints, model, batches, gather))
        parameters = live.size_of(trainer.model.parameters())
        cached = hold_cached(job, data, gather)
        buffers = live.live - parameters
        buckets = gradient_buckets(trainer, party)
        received = receive_buffers(buckets, party)
        gradients = live.live - buffers - parameters
        exchange = GradientReducer(buckets, party, SoloTransport(), trainer.compressor)
        for _ in range(NUM_STEPS):
            live.forget_peak()
            trainer.train_step(exchange, party.owned, party.num_shards)
        optimizer = live.size_of(optimizer_tensors(trainer))
        state = live.size_of([*_tensors_of(trainer.model), *optimizer_tensors(trainer)])
        del received, cached
    elsewhere = uncopied = 0
    saved = FullSavings(0, 0)
    if partitions_state(job.strategy):
        is_full, layout = partitions_parameters(job.strategy), buckets.layout
        if is_full and party.size > 1:
            layout = lent_layout(trainer.params, trainer.num_extras)
        fewest = fewest_mirrored(job.strategy)
        is_mirrored = fewest is not None and party.size >= fewest
        held = largest_slice(layout, party.size, is_mirrored=is_mirrored)
        elsewhere = round(optimizer * (1.0 - held))
        uncopied = round(sum(param.nbytes for _, param in trainer.params) * (1.0 - held))
        if is_full:
            rows = -(-num_rows // party.num_shards)
            is_one_pass = len(party.owned) == 1 and len(job.window.cut(rows)) == 1
            saved = full_savings(
                *(trainer.model, trainer.params, layout, held),
                gives_back=party.size > 1 and site.device.type == "cpu",
                num_sets=num_sets(party),
                is_one_pass=is_one_pass,
            )
    away = elsewhere + saved.parameters + saved.gradients
    return Reading(
        parameters=parameters - saved.parameters,
        buffers=buffers,
        gradients=gradients - saved.gradients,
        optimizer=optimizer - elsewhere,
        before_backward=live.before_backward - away,
        peak=live.peak - away,
        num_parameters=sum(param.numel() for param in trainer.model.parameters()),
        state=state - elsewhere - uncopied,
        layout=tuple(TensorLayout(name, tuple(param.shape)) for name, param in trainer.params),
    )


def play_forward(job: JobSpec, site: Site, num_rows: int) -> Reading:
    """Measure, with fake tensors, what running the model without gradients over some rows holds."""
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
        state = live.size_of(_tensors_of(model))
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
    """Return the bytes that torch reserves for libraries, whatever the model."""
    if device.type != "cuda":
        return 0
    is_large = torch.cuda.get_device_capability(device) >= HOPPER
    return 32 << 20 if is_large else CUBLAS_BYTES


def gradient_buckets(trainer: Trainer, party: ShardOwners) -> GradientBuckets:
    buckets = GradientBuckets(trainer.params, num_extras=trainer.num_extras)
    buckets.tensors(num_sets(party) - 1)
    return buckets


def largest_slice(layout: BucketLayout, size: int, *, is_mirrored: bool = False) -> float:
    """Return the share of all trained elements that the member with most of them owns, where each
    keeps the optimizer's state of its own slice; and of the one before it, with mirrors."""
    owners = divide_slices(layout, size)
    owned = [sum(part.stop - part.first for part in own) for own in owners.parts]
    held = owned
    if is_mirrored:
        held = [own + owned[owners.mirrored_rank(rank)] for rank, own in enumerate(owned)]
    return max(held) / max(1, sum(owned))


def receive_buffers(buckets: GradientBuckets, party: ShardOwners) -> object:
    """Allocate the buffers into which the exchange between machines receives partial sums."""
    if party.size == 1:
        return None
    step = plan_step(party, party.num_shards)
    sets = [buckets.tensors(index) for index in range(num_sets(party))]
    return prepare(cut_pieces(buckets.layout, party.size), party, step, sets, WINDOW)


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def optimizer_tensors(trainer: Trainer) -> list[Tensor]:
    values = chain.from_iterable(state.values() for state in trainer.optimizer.state.values())
    return [value for value in values if isinstance(value, Tensor)]


@dataclass(frozen=True, slots=True)
class ShapedRows:
    """A data set of so many rows, of which nothing but the shapes is asked."""

    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        raise NotImplementedError("rows of a played step have no values")


@dataclass(frozen=True)
class ShapesOnly(Gather):
    """Rows of the right shapes and types, without values. Called where tensors are fake."""

    x: Any
    y: Any

    def fitted(self, job: JobSpec, model: nn.Module) -> "ShapesOnly":
        """Return it with rows of the dtype that the model gets."""
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
    """The data sets that are on the device, if the job wants that. Rows as those of training."""
    if job.execution.memory != "Cached":
        return None
    used = {_split(job), *([job.evaluation.split] if job.evaluation is not None else [])}
    return [
        gather(dataset, torch.arange(len(dataset)), "caching data sets")
        for split, dataset in data.items()
        if split in used
    ]


def _split(job: JobSpec) -> str:
    """The split whose rows pass through the model."""
    return job.evaluation.split if job.only_evaluates and job.evaluation else "train"


def gather_shapes(job: JobSpec, site: Site, data: Mapping[str, Dataset]) -> ShapesOnly:
    """Gathers nothing but the shapes of rows, in the dtypes of the data. To be called where tensors
    are real."""
    x, y = Gather(None, torch.device("cpu"))(data[_split(job)], torch.arange(1), "reading one row")
    return ShapesOnly(None, site.device, x, y)
