"""The parameters of a model of which this process keeps only slices: whole, block by block, while
they are needed (ZeRO stage 3, https://arxiv.org/abs/1910.02054).

Before the forward pass of a block its parameters are gathered into fresh storage. What autograd
saves of them for backward is a note of the place, and they are gathered again when backward asks
for it. So backward never finds storage that was freed or written over, whatever the model's graph
is, and only one block is in memory at a time. Parameters that belong to no block, or to several,
are here from the beginning of a pass to its end. The module does not know how parameters travel.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.exchange.slice_owners import HeldBlocks, SliceOwners, hold_blocks
from stratagem.worker.exchange.transports import ParameterTransport

_FIELD: Final = "strategy.options.partition_state"
_NAME: Final = "_stratagem_name"
_REST: Final = 0
"""Number of the block with parameters that belong to no block of the model, or to several."""
_WITHOUT_VALUES: Final = frozenset(
    {
        *(Tensor.numel, Tensor.nelement, Tensor.size, Tensor.dim, Tensor.element_size),
        *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.stride, Tensor.__len__),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
        *(
            getattr(getattr(Tensor, name), access)
            for name in ("shape", "dtype", "device", "layout", "is_leaf", "requires_grad", "grad")
            for access in ("__get__", "__set__", "__delete__")
        ),
        *(getattr(Tensor, name).__get__ for name in ("is_sparse", "_version")),
    }
)
"""The functions that may be called with a parameter whose values are not in memory."""


class AbsentParameter(nn.Parameter):
    """Class of a parameter while its values are not in memory: reading them raises an error."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func not in _WITHOUT_VALUES:
            names = [getattr(absent, _NAME) for absent in _flat(args) if isinstance(absent, cls)]
            text = (
                f"full, but the model reads {', '.join(names) or 'a parameter'} outside of the "
                "forward pass of the layer that has it, where no worker has all of it; optimizer "
                "keeps parameters whole"
            )
            raise InvalidInputError.at(_FIELD, text)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Place(NamedTuple):
    """A placeholder that autograd saves instead of a parameter or a view of one."""

    block: int
    number: int
    """The index of the parameter in the block."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ParameterBlock(NamedTuple):
    """A block's parameters, which are gathered and freed together."""

    indices: tuple[int, ...]
    """The indices of the block's parameters among all parameters."""
    params: tuple[nn.Parameter, ...]


class GatheredBlocks:
    """Gathers a model's parameters block by block when needed. Used by one thread."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        modules: Sequence[nn.Module],
        owners: SliceOwners,
        whole: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        """Register hooks on the blocks. modules: the blocks of the model that has `params`. whole:
        its other tensors, which always stay in memory."""
        _check_storage(params, whole)
        self._params = [param for _, param in params]
        self._absent = [
            torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape)
            for p in self._params
        ]
        for name, param in params:
            setattr(param, _NAME, name)
        self._blocks = divide_parameters(self._params, modules)
        self.held: HeldBlocks = hold_blocks(
            owners,
            [block.indices for block in self._blocks],
            [param.element_size() for param in self._params],
        )
        self._depths = [0] * len(self._blocks)
        """The number of running forward calls per block; parameters stay while there is one."""
        self._versions: list[list[int]] = [[] for _ in self._blocks]
        """Per block, the tensor versions of the parameters when the outermost call began."""
        self._whole: dict[int, list[Tensor]] = {}
        """The gathered parameters, keyed by block."""
        self._places: dict[int, tuple[int, int]] = {}
        """(block, index in the block) of each gathered parameter, keyed by storage address."""
        self._transport: ParameterTransport | None = None
        for number, module in enumerate(_own_modules(modules, self._blocks[1:]), start=1):
            module.register_forward_pre_hook(self._before(number), prepend=True)
            module.register_forward_hook(self._after(number), always_call=True)

    def connect(self, transport: ParameterTransport) -> None:
        """Fetch blocks over this transport from now on."""
        self._transport = transport

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context manager around the model's passes, in which blocks are gathered when needed."""
        self._put(_REST)
        before = self._versions_of(_REST)
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
            if self._versions_of(_REST) != before:
                raise _changed("the model")
        finally:
            self.leave()

    def end_passes(self) -> None:
        """Wait until no member needs a block any more. Raises ExchangeError."""
        if self._transport is not None:
            self._transport.end_passes()

    def leave(self) -> None:
        """Free the memory of all gathered parameters."""
        for number in range(len(self._blocks)):
            self._depths[number] = 0
            self._take_away(number)
        self._whole.clear()
        self._places.clear()

    def make_whole(self) -> None:
        """Give all parameters uninitialised storage of full size, to be filled by the caller."""
        for param in self._params:
            param.__class__ = nn.Parameter
            param.data = torch.empty_like(param, memory_format=torch.contiguous_format)

    # ---- Blocks in memory ----

    def _put(self, number: int) -> None:
        whole = self._gathered(number)
        for param, tensor in zip(self._blocks[number].params, whole, strict=True):
            param.__class__ = nn.Parameter
            param.data = tensor

    def _take_away(self, number: int) -> None:
        block = self._blocks[number]
        for index, param in zip(block.indices, block.params, strict=True):
            param.__class__ = nn.Parameter
            param.data = self._absent[index]
            param.__class__ = AbsentParameter

    def _gathered(self, number: int) -> list[Tensor]:
        """Return the full parameters of a block; free other blocks that are not in use."""
        tensors = self._whole.get(number)
        if tensors is not None:
            return tensors
        for other in list(self._whole):
            if other != _REST and not self._depths[other]:
                del self._whole[other]
        self._places = {
            address: place for address, place in self._places.items() if place[0] in self._whole
        }
        tensors = self._whole[number] = self._gather(number)
        for place, tensor in enumerate(tensors):
            if tensor.numel():
                self._places[tensor.untyped_storage().data_ptr()] = (number, place)
        return tensors

    @torch.no_grad()
    def _gather(self, number: int) -> list[Tensor]:
        """Fetch a block's parameters into newly allocated storage."""
        if self._transport is None:
            raise RuntimeError("connect comes first")
        block = self._blocks[number]
        made = [
            torch.empty(absent.shape, dtype=absent.dtype, device=absent.device)
            for absent in (self._absent[index] for index in block.indices)
        ]
        if not made:
            return made
        flats = {i: t.view(-1) for i, t in zip(block.indices, made, strict=True)}
        targets, sources = list[Tensor](), list[Tensor]()
        given = self._transport.fetch(number)
        failpoint("worker.parameters.gathered")
        for parts, received in zip(self.held.parts, given, strict=True):
            for part, start in ((held_part.part, held_part.start) for held_part in parts[number]):
                flat = flats[part.index]
                size = (part.stop - part.first) * flat.element_size()
                targets.append(flat[part.first : part.stop])
                sources.append(received[start : start + size].view(flat.dtype))
        torch._foreach_copy_(targets, sources)
        return made

    # ---- Hooks ----

    def _before(self, number: int) -> Any:
        owner = weakref.ref(self)

        def hook(module: nn.Module, args: Any) -> None:
            blocks = owner()
            if blocks is not None and blocks._transport is not None:
                if not blocks._depths[number]:
                    blocks._put(number)
                    blocks._versions[number] = blocks._versions_of(number)
                blocks._depths[number] += 1

        return hook

    def _after(self, number: int) -> Any:
        owner = weakref.ref(self)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            blocks = owner()
            if blocks is not None and blocks._depths[number]:
                blocks._depths[number] -= 1
                if not blocks._depths[number]:
                    changed = blocks._versions_of(number) != blocks._versions[number]
                    blocks._take_away(number)
                    if changed:
                        raise _changed(type(module).__name__)

        return hook

    def _versions_of(self, number: int) -> list[int]:
        return [param._version for param in self._blocks[number].params]

    def _pack(self, tensor: Tensor) -> Any:
        """Return what autograd saves: a placeholder for (parts of) gathered parameters."""
        if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            location = self._places.get(tensor.untyped_storage().data_ptr())
            if location is not None and tensor.dtype == self._whole[location[0]][location[1]].dtype:
                offset = int(tensor.storage_offset())
                return _Place(*location, tensor.size(), tensor.stride(), offset)
        return tensor, tensor._version

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _Place):
            whole = self._gathered(saved.block)[saved.number]
            return whole.as_strided(saved.size, saved.stride, saved.offset)
        tensor: Tensor = saved[0]
        if tensor._version != saved[1]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(tensor.shape)} is at version "
                f"{tensor._version}; expected version {saved[1]} instead"
            )
        return tensor


def _changed(what: str) -> InvalidInputError:
    text = f"full, but a forward pass of {what} has changed its parameters in place"
    return InvalidInputError.at(_FIELD, f"{text}, which would be lost")


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _check_storage(
    params: Sequence[tuple[str, nn.Parameter]], whole: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise InvalidInputError for parameters that cannot be gathered into separate storage, or that
    share storage with other tensors."""
    seen: dict[int, str] = {}
    for name, param in params:
        if param.numel():
            _check_alone(seen.setdefault(param.untyped_storage().data_ptr(), name), name)
    for name, tensor in whole:
        if tensor.numel() and tensor.layout is torch.strided:  # sparse ones have no one storage
            _check_alone(seen.get(tensor.untyped_storage().data_ptr(), name), name)


def _check_alone(holder: str, name: str) -> None:
    """Raise InvalidInputError if another tensor than the one of this name uses the same storage."""
    if holder != name:
        text = f"full needs parameters with storage of their own; {holder} and {name} share one"
        raise InvalidInputError.at(_FIELD, text)


def divide_parameters(
    params: Sequence[nn.Parameter], modules: Sequence[nn.Module]
) -> list[ParameterBlock]:
    """Return the blocks of parameters; the first has those that belong to no or several modules."""
    index_of = {id(param): index for index, param in enumerate(params)}
    users: dict[int, set[int]] = {index: set() for index in range(len(params))}
    for number, module in enumerate(modules):
        for param in module.parameters():
            if id(param) in index_of:
                users[index_of[id(param)]].add(number)
    alone = {index: next(iter(numbers)) for index, numbers in users.items() if len(numbers) == 1}
    groups = [tuple(index for index in users if index not in alone)]
    groups += [tuple(i for i in users if alone.get(i) == number) for number in range(len(modules))]
    first, *others = groups
    used_groups = [first, *(group for group in others if group)]
    return [ParameterBlock(group, tuple(params[index] for index in group)) for group in used_groups]


def _own_modules(modules: Sequence[nn.Module], blocks: Sequence[ParameterBlock]) -> list[nn.Module]:
    """Return for each block the module that it belongs to."""
    owners = []
    for block in blocks:
        wanted = id(block.params[0])
        owners.append(next(m for m in modules if any(id(p) == wanted for p in m.parameters())))
    return owners
