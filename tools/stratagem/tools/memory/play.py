"""Play training steps of one worker with fake tensors to see how much memory they hold.

The engine itself is run, so that the memory is that of a real run: gradient buckets, copies of
buffers, temporaries of the optimizer. Fake tensors take shapes from one row of the real data and
need no memory. The module does not know the purpose of an estimate.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stratagem.common.compression import TensorLayout
from stratagem.common.job import JobSpec
from stratagem.common.strategy import fewest_mirrored, partitions_parameters, partitions_state
from stratagem.worker.data.datasets import Dataset, Gather, map_tensors
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.engine.build import make_setup
from stratagem.worker.engine.gathered_blocks import divide_parameters
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.exchange.all_reduce import WINDOW, cut_pieces, prepare
from stratagem.worker.exchange.buckets import NUM_WINDOWS, GradientBuckets
from stratagem.worker.exchange.layout import (
    LENT_BUCKET_BYTES,
    BucketLayout,
    ShardOwners,
    num_sets,
    plan_layout,
    plan_step,
)
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.slice_owners import divide_slices
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.models.build import build_shapes
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.model import layers_of
from stratagem.worker.objectives.step_function import make_objective
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Live bytes ----
#
# The bytes of tensors are counted from their creation to their end, operation by operation, for
# real tensors and for fake ones; with fake ones, whole training steps can be played through for
# models far larger than this machine. The memory that a kernel needs inside an operation is not
# seen.

CUDA_BLOCK_BYTES: Final = 512
"""torch's CUDA allocator gives out multiples of this."""

_READ_VALUE: Final = torch.ops.aten._local_scalar_dense.default


class LiveBytes(TorchDispatchMode):
    """Counts live storages: while it is entered, every storage made on `device` counts until it is
    freed.

    A fake tensor has no values. Where a program reads one (the loss, a norm, a count) it gets 1.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device.type
        self._block = CUDA_BLOCK_BYTES if device.type == "cuda" else 1
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.live = 0
        self.peak = 0
        self.before_backward = 0
        """The most that was live when a backward began."""
        self._is_in_backward = False

    def forget_peak(self) -> None:
        """Restart the peaks from the bytes that are live now."""
        self.peak, self.before_backward = self.live, 0

    def size_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages of these tensors; shared ones count once."""
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor.device.type == self._type
        }
        return sum(map(self._rounded, storages.values()))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _READ_VALUE and isinstance(args[0], FakeTensor):
            return _one_of(args[0].dtype)
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_backward and not self._is_in_backward:
            self.before_backward = max(self.before_backward, self.live)
        self._is_in_backward = is_in_backward
        made = func(*args, **(kwargs or {}))
        if func is LAYER and isinstance(args[0], FakeTensor):
            made = with_workspace(made, args)
        scratch = scratch_bytes(func, args, made)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.device.type == self._type:
                self._see(leaf)
        self.peak = max(self.peak, self.live + scratch)
        return made

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, self._rounded(storage.nbytes())
        known = self._sizes.get(key)
        if known is not None:
            self.live += size - known[0]  # resized in place, or as it was
            self._sizes[key] = (size, known[1])
            return
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = (size, reference)
        self.live += size

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)[0]


def _one_of(dtype: torch.dtype) -> float | int | bool | complex:
    if dtype == torch.bool:
        return True
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else 1


# ---- Site of the job ----
#
# The site says what may be imported, and has the job's data and the kind of device.


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a job would run: what may be imported, where data are, and the kind of
    device. It keeps the data of the last job, for further questions about that."""

    entrypoints: EntryPoints
    device: torch.device
    sources: DataSources
    _loaded: list[tuple[JobSpec, dict[str, Dataset]]] = field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def data_of(self, job: JobSpec) -> dict[str, Dataset]:
        """Return the job's data by split: loaded, unless those of the last job are the same."""
        if not self._loaded or not _loads_alike(job, *self._loaded[0]):
            self._loaded.clear()  # before there are two of them in memory
            self._loaded.append((job, load_data(job, self.entrypoints, self.sources)))
        return dict(self._loaded[0][1])


def _loads_alike(job: JobSpec, known: JobSpec, data: dict[str, Dataset]) -> bool:
    """Return whether a job would load what another one has loaded. Streams know their job."""
    if any(isinstance(dataset, StreamDataset) for dataset in data.values()):
        return job == known
    return _read_by_loading(job) == _read_by_loading(known)


def _read_by_loading(job: JobSpec) -> tuple[Any, ...]:
    """Return all that decides which rows there are, and whether they are refused."""
    execution = job.execution
    return (
        *(job.data, job.partition, job.seed, job.only_evaluates, job.evaluation),
        *(execution.deterministic, execution.memory),
    )


# ---- Played step ----

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


# ---- Memory of CPU kernels ----
#
# Some CPU kernels take memory besides their outputs, which fake tensors do not show. The LSTM of
# oneDNN returns its workspace as an opaque tensor, and torch's shape function says that it is
# empty. It grows by the same amount with each time step, so the kernel is run for one and for two.
# Convolutions that oneDNN does not do, those in float64, unfold their input into columns.

_CONVOLUTIONS: Final = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
)
LAYER: Final = torch.ops.aten.mkldnn_rnn_layer.default
BACKWARD: Final = torch.ops.aten.mkldnn_rnn_layer_backward.default
SCRATCH_FRACTION: Final = 0.28
"""Of the workspace of an LSTM: what backward needs more for a moment. Measured: 0.272 to 0.280
for 16 to 32 rows, 24 to 48 time steps and 64 to 128 features."""


def with_workspace(made: Any, args: tuple[Any, ...]) -> Any:
    """The outputs of the layer, the last with as many bytes as the kernel would fill."""
    *others, workspace = made
    size = workspace_bytes(args)
    return (*others, torch.empty(size, dtype=workspace.dtype, device=workspace.device))


def workspace_bytes(args: tuple[Any, ...]) -> int:
    """Return the workspace of the layer with these arguments; the input is (time, rows,
    features)."""
    one, two = (_run(args, num_steps) for num_steps in (1, 2))
    num_steps: int = args[0].shape[0]
    return one + (num_steps - 1) * (two - one)


def scratch_bytes(func: Any, args: tuple[Any, ...], made: Any) -> int:
    """Return the temporary memory of an operation, computed from its arguments and its result."""
    if func is BACKWARD:  # its last argument is the workspace
        return int(SCRATCH_FRACTION * args[-1].untyped_storage().nbytes())
    if func in _CONVOLUTIONS:
        is_backward = func is _CONVOLUTIONS[1]
        x, weight = args[1:3] if is_backward else args[:2]
        return _columns_bytes(x, weight, args[0] if is_backward else made)
    return 0


def _columns_bytes(x: Tensor, weight: Tensor, output: Tensor) -> int:
    """x: (rows, channels, …); weight: (…, …, *kernel); output: (rows, …, *size)."""
    if x.device.type != "cpu" or x.dtype != torch.float64 or weight.dim() < 4:
        return 0
    columns = x.shape[1] * weight.shape[2:].numel()
    return x.shape[0] * columns * output.shape[2:].numel() * x.element_size()


def _run(args: tuple[Any, ...], num_steps: int) -> int:
    x, *rest = args
    shapes = [(num_steps, *x.shape[1:])]
    shapes += [tuple(argument.shape) for argument in rest if isinstance(argument, Tensor)]
    plain = [argument for argument in rest if not isinstance(argument, Tensor)]
    with _disable_current_modes(), torch.enable_grad():
        tensors = [torch.zeros(shape, dtype=x.dtype) for shape in shapes]
        workspace: Tensor = LAYER(*tensors, *plain)[3]
        return workspace.untyped_storage().nbytes()


# ---- Savings of full slices ----
#
# A member holds less where each keeps a slice of parameters and gradients, too.

_NUM_UNDER_WAY = 2
"""Buckets that backward is filling, or that wait for a window."""


@dataclass(frozen=True, slots=True)
class FullSavings:
    """Bytes that are not on a member; negative where it holds more."""

    parameters: int
    gradients: int


def lent_layout(params: Sequence[tuple[str, nn.Parameter]], num_extras: int) -> BucketLayout:
    """Return the layout of buckets that give their memory back."""
    shapes = [(name, param.dtype, param.shape) for name, param in params]
    return plan_layout(shapes, num_extras=num_extras, bucket_bytes=LENT_BUCKET_BYTES)


def full_savings(
    model: nn.Module,
    params: Sequence[tuple[str, nn.Parameter]],
    layout: BucketLayout,
    share: float,
    *,
    gives_back: bool,
    num_sets: int,
    is_one_pass: bool,
) -> FullSavings:
    """Return what the member with the largest share saves.

    share: of all trained elements, those that it holds, its own and those of a mirror. gives_back:
    buckets of gradients are freed in the step, as those of a lone member are not. is_one_pass: it
    computes one micro-batch in each step; else sums over its own stay whole.
    """
    trained = sum(param.nbytes for _, param in params)
    rest, *blocks = divide_parameters([param for _, param in params], layers_of(model))
    gathered = _nbytes(rest.params) + max((_nbytes(each.params) for each in blocks), default=0)
    owned = round(share * trained)
    sizes = [bucket.size_bytes for bucket in layout.buckets[:-1]]
    widest, whole = max(sizes, default=0), sum(sizes)
    gradients = 0
    if gives_back:
        under_way = min(whole, _NUM_UNDER_WAY * widest) if is_one_pass else num_sets * whole
        held = round(share * whole) + NUM_WINDOWS * widest * num_sets + under_way
        gradients = num_sets * whole - held
    return FullSavings(trained - owned - gathered, gradients)


def _nbytes(params: Sequence[nn.Parameter]) -> int:
    return sum(param.nbytes for param in params)
