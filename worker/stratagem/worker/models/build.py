"""Build the model of a job: once for real, from the seed, and elsewhere empty, to be filled from a
state.

An empty model is built on the meta device, so no memory is touched and nothing is initialised. A
factory that cannot do that (it reads values, or keeps tensors that are no part of the state) is run
for real instead.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from stratagem.common.base.errors import InvalidInputError, LimitError, UnfitModelError
from stratagem.common.job import JobSpec
from stratagem.common.job.optimizer import check_groups, check_turn_parameters, is_matched
from stratagem.common.model.graph import GraphSpec, NodeSpec
from stratagem.common.model.program import ModelProgram, flatten
from stratagem.common.schema.json import not_one_of, thawed, unknown_key
from stratagem.worker.models.program import Slots, evaluate, run_calls
from stratagem.worker.models.tensors import check_tensors, convert, memory_of
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- Models from graph documents ----
#
# A graph document has named nodes of allow-listed torch.nn modules, edges and subgraphs. Parameters
# are called `<node id>.<name>` (inside a subgraph `<subgraph id>.<node id>.<name>`), and modules
# are made in the order of the document, so that a chain of nodes is initialised exactly as the same
# nn.Sequential.


class Add(nn.Module):
    """Add all inputs, in order of port."""

    def forward(self, *inputs: Tensor) -> Tensor:
        total = inputs[0]
        for tensor in inputs[1:]:
            total = total + tensor
        return total


class Multiply(nn.Module):
    """Multiply all inputs, in order of port."""

    def forward(self, *inputs: Tensor) -> Tensor:
        product = inputs[0]
        for tensor in inputs[1:]:
            product = product * tensor
        return product


class Concat(nn.Module):
    """Concatenate all inputs along one dimension, in order of port."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, self.dim)


class Select(nn.Module):
    """Select one element of an output that is a tuple, such as that of an LSTM."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index

    def forward(self, value: Sequence[Any]) -> Any:
        return value[self.index]


class Permute(nn.Module):
    """Permute the dimensions."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, value: Tensor) -> Tensor:
        return value.permute(self.dims)


class Mean(nn.Module):
    """Average over one dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, value: Tensor) -> Tensor:
        return value.mean(self.dim)


# fmt: off
_TORCH_MODULES: Final = (
    # affine, convolution
    "Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d",
    # embedding, recurrence, attention
    "Embedding", "EmbeddingBag", "RNN", "LSTM", "GRU", "MultiheadAttention",
    "TransformerEncoderLayer",
    # normalisation
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "GroupNorm", "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d", "LocalResponseNorm", "RMSNorm",
    # activations
    "ReLU", "ReLU6", "LeakyReLU", "PReLU", "RReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish",
    "Sigmoid", "Tanh", "Softplus", "Softsign",
    "Softmax", "LogSoftmax", "Hardtanh", "Hardswish", "Hardsigmoid", "LogSigmoid", "GLU",
    "Threshold",
    # pooling
    "MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    # dropout
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout",
    # shape
    "Flatten", "Unflatten", "Identity", "Upsample", "PixelShuffle", "PixelUnshuffle", "ZeroPad2d",
    "ConstantPad1d",
    "ConstantPad2d", "ReflectionPad2d", "ReplicationPad2d",
)
# fmt: on

MODULES: Final[Mapping[str, Callable[..., nn.Module]]] = {
    **{name: getattr(nn, name) for name in _TORCH_MODULES},
    **{kind.__name__: kind for kind in (Add, Multiply, Concat, Select, Permute, Mean)},
}


class GraphModule(nn.Module):
    """Model of a graph document: runs nodes in topological order, with inputs by port.

    The model's inputs go to the input nodes, before the values of edges. One output is returned
    directly, several as a tuple. Without named inputs or outputs these are the nodes without
    incoming or outgoing edges. Subgraphs only determine names: the outermost graph runs all nodes.
    """

    def __init__(self, graph: GraphSpec) -> None:
        super().__init__()
        self._program = flatten(graph)
        for node in graph.nodes:
            self._add(node.id, _make_node(node))
        for subgraph in graph.subgraphs:
            self._add(subgraph.id, GraphModule(subgraph.graph))

    def _add(self, name: str, module: nn.Module) -> None:
        if hasattr(self, name):
            raise InvalidInputError.at("model.graph", f'"{name}" cannot be the id of a node')
        self.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        program, slots = self._program, Slots()
        modules = node_modules(self, program)
        given = inputs[0] if len(inputs) == 1 else inputs
        run_calls(program.calls, modules, program.num_uses, given, slots)
        return evaluate(program.output, given, slots)


def node_modules(model: nn.Module, program: ModelProgram) -> dict[str, nn.Module]:
    """Return the module of each node of the program, keyed by node."""
    return {call.node: model.get_submodule(call.node.replace("/", ".")) for call in program.calls}


def graph_module(graph: GraphSpec) -> nn.Module:
    """Return the model of a graph document, initialised from torch's default generator."""
    return GraphModule(graph)


def _make_node(node: NodeSpec) -> nn.Module:
    field = f"model.graph.{node.id}"
    kind = MODULES.get(node.module)
    if kind is None:
        raise InvalidInputError.at(f"{field}.module", not_one_of(node.module, sorted(MODULES)))
    parameters = inspect.signature(kind).parameters
    allowed = set(parameters) - {"device", "dtype"}
    for key in node.kwargs:
        if key not in allowed and "kwargs" not in parameters:
            raise InvalidInputError.at(f"{field}.kwargs.{key}", unknown_key(key, sorted(allowed)))
    try:
        module = kind(**thawed(node.kwargs))
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidInputError.at(f"{field}.kwargs", f"{node.module}: {error}") from error
    return module.requires_grad_(node.trainable)


# ---- Storage in files ----
#
# While a model is built, its large tensors may have storage in files, so that its size need not fit
# the memory: the kernel writes unused pages to the disk, which without swap it cannot do with a
# process's memory. The results are the same: the same operations run in the same order on the same
# numbers, drawn from the same generator; only their storage is in another place.

SMALLEST_BYTES: Final = 1 << 20
"""Minimum size in bytes of a storage that is put in a file."""
_EMPTY: Final = torch.ops.aten.empty.memory_format


class FileStorage(TorchDispatchMode):
    """Context manager in which large new CPU tensors are stored in files of a folder.

    The files have no names, and disappear with their tensors or with the process.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _EMPTY and _is_plain(kwargs):
            # Most tensors of a model begin so, hence they are not moved to files later, as others.
            meta = func(*args, **{**kwargs, "device": "meta"})
            if meta.untyped_storage().nbytes() >= SMALLEST_BYTES:
                return _view(meta, self._storage(meta.untyped_storage().nbytes()))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not any(_is_large(leaf) for leaf in tree_leaves(result)):
            return result
        # Results that share storage with an argument, as views do, must continue to share it.
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        moved: dict[int, UntypedStorage] = {}

        def move(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage() if _is_large(tensor) else None
            if storage is None or storage.data_ptr() in given:
                return tensor
            if storage.data_ptr() not in moved:
                moved[storage.data_ptr()] = self._storage(storage.nbytes())
                moved[storage.data_ptr()].copy_(storage)
            return _view(tensor, moved[storage.data_ptr()])

        return tree_map_only(Tensor, move, result)

    def _storage(self, num_bytes: int) -> UntypedStorage:
        """Return the memory of a new file. Raises LimitError if the disk is full, since a page that
        could not be written later would kill the process."""
        try:
            # The file never has a name, so a killed process leaves nothing behind.
            with TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                path = f"/proc/self/fd/{file.fileno()}"
                storage = UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
        except OSError as error:
            text = f"{self._folder} has no room for {num_bytes} bytes of a model: {error.strerror}"
            raise LimitError(text) from error
        assert isinstance(storage, UntypedStorage)
        return storage


def _is_plain(kwargs: Mapping[str, Any]) -> bool:
    """Return whether these tensor options mean ordinary storage on the CPU."""
    device, layout = kwargs.get("device"), kwargs.get("layout")
    is_cpu = device is None or torch.device(device).type == "cpu"
    return is_cpu and layout in (None, torch.strided) and not kwargs.get("pin_memory")


def _is_large(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.untyped_storage().nbytes() >= SMALLEST_BYTES
    )


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, as a sparse tensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _view(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """Return a tensor that differs only in its storage."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


# ---- Errors about the fit of job and model ----
#
# These errors have a special type because a site may pass them on, unlike other errors of input.


@contextmanager
def checks_of_the_model() -> Iterator[None]:
    """Context manager that turns input errors into UnfitModelError, around checks that read only
    the job and the names, types and shapes of the model's tensors."""
    try:
        yield
    except InvalidInputError as error:
        raise UnfitModelError(violations=error.violations) from None


# ---- Model builder ----

_PLAIN: Final = (bool, int, float, str, type(None))
_ACTIVITY: Final = "building the model"
_NUM_NAMES: Final = 5
"""Maximum number of parameters named in an error message."""


def build_model(
    job: JobSpec,
    entrypoints: EntryPoints,
    *,
    device: torch.device,
    fresh: bool,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> nn.Module:
    """Build the model of a job.

    fresh: initialise it from the seed; otherwise its values are undefined. folder: large tensors
    are in files there instead of memory, with the same bits. say: called with a sentence if the
    job's precision has changed dtypes.
    """
    factory, changes = _factory(job, entrypoints), ""

    def build() -> nn.Module:
        nonlocal changes
        model = factory()
        changes = convert(model, job)
        return model

    with nullcontext() if folder is None else FileStorage(folder):
        model = _build(build, job.seed, device, fresh=fresh)
    if changes:
        say(changes)
    return model


def _build(
    factory: Callable[[], nn.Module], seed: int, device: torch.device, *, fresh: bool
) -> nn.Module:
    if not fresh:
        empty = _build_empty(factory, device)
        if empty is not None:
            return empty
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        # Without a device torch would record a stack trace of each call, which takes 10 ms.
        torch.cuda.manual_seed_all(seed)
    with user_code(_ACTIVITY):
        model = factory()
    return model.to(device)


def build_shapes(job: JobSpec, entrypoints: EntryPoints, *, device: torch.device) -> nn.Module:
    """Build the model with shapes only, inside a mode of fake tensors.

    It is built outside of that mode: on the meta device, or for real if the factory needs values.
    """
    factory = _factory(job, entrypoints)
    with _disable_current_modes():
        model = _build_meta(factory)
        if model is None or _hides_any(model):
            with user_code(_ACTIVITY):
                model = factory()
        convert(model, job)
    _materialise(model, device)
    return model


def _factory(job: JobSpec, entrypoints: EntryPoints) -> Callable[[], nn.Module]:
    spec = job.model
    if spec.entrypoint is not None:
        build = entrypoints.bind(spec.entrypoint, spec.kwargs, "model")
    elif spec.graph is not None:
        build = partial(graph_module, spec.graph)
    else:
        raise InvalidInputError.at("model", "names neither an entrypoint nor a graph")
    by = "the graph" if spec.entrypoint is None else f'"{spec.entrypoint}"'
    return lambda: _as_trained(_checked(build(), by), job)


@checks_of_the_model()
def _as_trained(model: nn.Module, job: JobSpec) -> nn.Module:
    """Freeze the parameters that the job does not train; raise InvalidInputError if a group of the
    optimizer is empty."""
    params = list(model.named_parameters())
    for i, pattern in enumerate(job.model.freeze or ()):
        frozen = [param for name, param in params if is_matched(name, (pattern,))]
        if not frozen:
            names = ", ".join(name for name, _ in params[:_NUM_NAMES])
            text = f"{pattern!r} fits no parameter; the first are {names or 'none'}"
            raise InvalidInputError.at(f"model.freeze[{i}]", text)
        for param in frozen:
            param.requires_grad_(False)
    trained = [(name, param.dim()) for name, param in params if param.requires_grad]
    if job.turns is not None:
        check_turn_parameters(job.turns, trained)
    elif not job.only_evaluates:
        check_groups(job.optimizer, trained)
    return model


def _checked(model: object, by: str) -> nn.Module:
    """Return a factory's result; raise InvalidInputError if it is no model. by: its name."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise InvalidInputError.at("model", f"{by} returned a {kind}, not a torch.nn.Module")
    check_tensors(model)
    return model


def _build_meta(factory: Callable[[], nn.Module]) -> nn.Module | None:
    try:
        with torch.device("meta"):
            return factory()
    except (RuntimeError, TypeError):  # the factory reads values, which meta tensors do not have
        return None


def _build_empty(factory: Callable[[], nn.Module], device: torch.device) -> nn.Module | None:
    model = _build_meta(factory)
    if model is None or _shares_memory(model):
        return None
    if not all(_can_be_empty(module) for module in model.modules()):
        return None
    _materialise(model, device)
    return None if _hides_any(model) else model


def _can_be_empty(module: nn.Module) -> bool:
    """Return whether loading a state completes a module built on the meta device.

    Its parameters must have no hooks, no subclass, no attributes but plain values (which are
    copied), and no parametrizations, which make other tensors on the meta device.
    """
    if module._non_persistent_buffers_set or is_parametrized(module):
        return False
    params = [param for param in module._parameters.values() if param is not None]
    return not any(
        param._backward_hooks
        or param._post_accumulate_grad_hooks
        or len(_plain_attributes(param)) < len(vars(param))
        or type(param) is not nn.Parameter
        for param in params
    )


def _plain_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor's attributes with plain values, such as `is_tp = True`."""
    return {name: value for name, value in vars(tensor).items() if type(value) in _PLAIN}


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for every parameter and buffer; tied ones stay tied."""
    made: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = _empty_like(tensor, device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            vars(empty).update(_plain_attributes(tensor))
            made[id(tensor)] = empty
        return made[id(tensor)]

    held: list[Tensor] = []  # keeps ids unique while we replace
    for module in model.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                held.append(tensor)
                # setattr also updates the second list of weights that RNNs keep.
                setattr(module, key, twin(tensor))


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.layout is torch.strided and tensor.is_contiguous():
        # On the meta device empty_like imports a computer algebra system, which takes seconds.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)


def _shares_memory(model: nn.Module) -> bool:
    """Return whether parameters or buffers share memory, which `_materialise` would separate."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    dense = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
    return len({memory_of(tensor) for tensor in dense}) < len(dense)


def _hides_any(model: nn.Module) -> bool:
    """Return whether tensors of the meta device are hidden outside of parameters and buffers, such
    as in attributes or hooks."""
    for module in model.modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            if any(tensor.is_meta for tensor in _tensors(value)):
                return True
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case list() | tuple() | set():
            for item in value:
                yield from _tensors(item)
        case dict():
            for item in value.values():
                yield from _tensors(item)
        case partial():
            yield from _tensors([value.args, value.keywords])
        case FunctionType():
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it is not set yet
                    held = cell.cell_contents
                    if isinstance(held, Tensor):
                        yield held
