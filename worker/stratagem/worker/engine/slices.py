"""The part of an optimizer that one member keeps, if each member owns a slice of all parameters.

For each parameter of which the member owns some elements it has one piece: a view of these elements
with their own optimizer state. With a mirror it also has the pieces of the previous member and
updates them to the same bits from the same sums, so that they survive the loss of that member. The
optimizer updates pieces as if they were whole parameters; only optimizers for which this gives the
same bits are allowed. The module does not know how slices are transferred.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.same_bytes import ParameterSlice, SliceName
from stratagem.worker.engine import state_format
from stratagem.worker.engine.apply_step import (
    Applied,
    StepPolicy,
    StepSummary,
    apply_step,
    place_of,
)
from stratagem.worker.engine.gathered_blocks import GatheredBlocks
from stratagem.worker.engine.reports import StepReport
from stratagem.worker.engine.state_format import dealt_out
from stratagem.worker.exchange.layout import BucketLayout, parts_of, total_norm
from stratagem.worker.exchange.reducer import Reducer
from stratagem.worker.exchange.slice_owners import (
    HeldBlocks,
    OwnedPart,
    SliceOwners,
    divide_slices,
)
from stratagem.worker.exchange.slices import SliceExchange
from stratagem.worker.exchange.transports import ParameterTransport, StepScalars
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.numerics.model import layers_of

NamedParams = Sequence[tuple[str, nn.Parameter]]
_FIELD: Final = "strategy.options.partition_state"


class StateShare(NamedTuple):
    """The slice of the optimizer's state that this member keeps: slice number `rank` of `size`."""

    rank: int
    size: int
    is_mirrored: bool = False
    """True if a copy of the previous member's slice is kept here, too."""
    is_full: bool = False
    """True if this member also keeps only its slice of the parameters."""


@dataclass(frozen=True, slots=True)
class StepInDoubt:
    """A step with its gradient sums but without their norm; other members may have applied it."""

    step: int
    """The number of steps applied once this one is."""
    finish: Callable[[float, bool], StepReport]
    """Applies the step, given the norm and whether the gradient is finite."""


@dataclass(frozen=True, slots=True)
class _OwnPiece:
    name: str
    param: nn.Parameter
    part: OwnedPart
    flat: nn.Parameter
    """Flat leaf tensor with its own gradient: a view, or the only part here, of the parameter."""

    @property
    def is_whole(self) -> bool:
        return self.part.stop - self.part.first == self.param.numel()

    def name_in(self, place: int, name: str) -> str:
        """Return the name under which the piece is sent. place, name: index and name of its
        parameter among the model's tensors."""
        full = f"{state_format.MODEL}{name}"
        return str(ParameterSlice(place, self.part.first, tuple(self.param.shape), full))


class OptimizerPieces:
    """The pieces of parameters that one member updates, and their optimizer. Used by one thread."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: NamedParams,
        owners: SliceOwners,
        rank: int,
        *,
        is_mirrored: bool = False,
        blocks: GatheredBlocks | None = None,
    ) -> None:
        """Make the pieces. optimizer: a new one over all parameters, changed to update the pieces
        instead. blocks: gathers the parameters, if only pieces of them are kept here."""
        for name, param in params:
            if not param.is_contiguous():
                text = f"needs contiguous parameters; {name} is not: its pieces would have copies"
                raise InvalidInputError.at(_FIELD, text)
        self.optimizer, self.owners, self.rank = optimizer, owners, rank
        self._names, self._params = {name for name, _ in params}, [param for _, param in params]
        self._pieces = [_piece_of(*params[part.index], part) for part in owners.parts[rank]]
        self.is_mirrored, self.mirrored_rank = is_mirrored, owners.mirrored_rank(rank)
        mirrored = owners.parts[self.mirrored_rank] if is_mirrored else ()
        self._mirrored = [_piece_of(*params[part.index], part) for part in mirrored]
        self._blocks = blocks
        self.held: HeldBlocks | None = None if blocks is None else blocks.held
        """The locations of the parameters' parts, if only pieces are kept here; else None."""
        self.passing: Callable[[], AbstractContextManager[None]] = (
            nullcontext if blocks is None else blocks.passing
        )
        """Returns a context manager for running the model, forward and backward."""
        self.summary: StepSummary | None = None
        """The summary of the latest step; None if its norm did not arrive."""
        self.in_doubt: StepInDoubt | None = None
        self.torn: str = ""
        """The reason why parameters of other slices are one step behind; "" if they are not."""
        self._has_sums = False
        self._step_pieces_only()
        if blocks is not None:
            self.take_parameters()
            blocks.leave()

    @property
    def holds_all(self) -> bool:
        """True if this member is the only one, so that it holds everything."""
        return len(self.owners.parts) == 1

    @property
    def tensors(self) -> list[Tensor]:
        """The flat pieces in order of parameter, then those of another member's mirrored slice."""
        return [piece.flat for piece in self._all()]

    def _all(self) -> list[_OwnPiece]:
        return [*self._pieces, *self._mirrored]

    def summarize(self, policy: StepPolicy, scalars: StepScalars, exchange: Reducer) -> StepSummary:
        """Set the gradient of each piece from the exchanged sums, and summarize the gradient of the
        whole model. Raises ExchangeError."""
        assert exchange.slices is not None  # the one is made with the other
        self.summary, self.in_doubt, self._has_sums = None, None, False
        sums = [*exchange.slices.sums(), *exchange.slices.mirrored_sums()]
        for piece, total in zip(self._all(), sums, strict=True):
            is_reached = scalars.reached[piece.part.index] != 0
            # As with whole parameters: a narrow one rounds its sum once.
            piece.flat.grad = total.to(piece.flat.dtype) if is_reached else None
        grads = [piece.flat.grad for piece in self._pieces]
        self._has_sums = True
        norms = [None if grad is None else parts_of([grad], policy.numerics)[0] for grad in grads]
        norm_parts, is_finite = exchange.slices.gather_norms(
            norms, scalars.reached, partial(_are_all_finite, grads)
        )
        norm = total_norm(norm_parts, policy.numerics)
        self.summary = StepSummary(scalars.loss, scalars.weight, norm, is_finite)
        return self.summary

    def doubt(self, step: int, finish: Callable[[float, bool], StepReport]) -> None:
        """Keep a step whose `summarize` has failed, if it can be finished once its norm is known.
        Its sums are copied out of the exchange's storage. See `StepInDoubt`."""
        if not self.is_mirrored or not self._has_sums:
            return
        for piece in self._all():
            if piece.flat.grad is not None:
                piece.flat.grad = piece.flat.grad.clone()
        self.in_doubt = StepInDoubt(step, finish)

    def apply(
        self, summary: StepSummary, policy: StepPolicy, step: int, exchange: Reducer | None
    ) -> Applied:
        """Update the pieces, and fetch the other members' updates into the parameters. exchange:
        None if the other members have left; then only the pieces are updated."""
        self.summary = summary
        applied = apply_step(
            summary, policy, place_of(policy, step), share=partial(self._bring, exchange)
        )
        return applied._replace(is_torn=bool(self.torn))

    def _bring(self, exchange: Reducer | None) -> bool:
        if exchange is None:
            self.torn = "others have ended the exchange"
            return False
        if exchange.parameters is not None:
            return self.end_step(partial(_tell_updated, exchange.parameters))
        assert exchange.slices is not None
        return self.share(exchange.slices)

    def connect(self, exchange: Reducer) -> None:
        """Fetch parameters that are not kept here over this exchange. Raises ExchangeError."""
        if self._blocks is not None:
            assert exchange.parameters is not None  # the one is made with the other
            self._move_to(exchange.parameters.memory())
            exchange.parameters.updated()
            self._blocks.connect(exchange.parameters)

    def end_passes(self) -> None:
        """Wait until no member needs the parameters of others any more. Raises ExchangeError."""
        if self._blocks is not None:
            self._blocks.end_passes()

    def load_model(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Load the model of a state. Divided parameters are whole for that time."""
        if self._blocks is None:
            state_format.load_model_state(model, tensors)
            return
        self._blocks.make_whole()
        try:
            state_format.load_model_state(model, tensors)
            self.take_parameters()
        finally:
            self._blocks.leave()

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Copy the pieces, also the mirror's, out of the parameters, which must be whole."""
        for piece in self._all():
            flat = piece.param.detach().view(-1)[piece.part.first : piece.part.stop]
            if piece.flat.data_ptr() == flat.data_ptr():  # still a view of it
                piece.flat.data = flat.clone()
            else:
                piece.flat.copy_(flat)

    @torch.no_grad()
    def _move_to(self, memory: Sequence[Tensor]) -> None:
        """Move this member's pieces into this memory: one tensor of bytes for each block of
        `HeldBlocks`. The mirror's pieces stay where they are, since no other member reads them."""
        assert self.held is not None
        by_index = {piece.part.index: piece.flat for piece in self._pieces}
        for parts, flat in zip(self.held.parts[self.rank], memory, strict=True):
            for part in parts:
                source = by_index[part.part.index]
                room = flat[part.start : part.start + source.nbytes].view(source.dtype)
                source.data = room.copy_(source)

    def share(self, exchange: SliceExchange) -> bool:
        """Copy the updated pieces of every member into the parameters on all members; return True
        if that succeeds, else do as `end_step` does."""
        flats = [piece.flat for piece in self._pieces]
        return self.end_step(partial(exchange.share, flats, self._params))

    def end_step(self, tell: Callable[[], None]) -> bool:
        """End a step by calling `tell`, a collective call; return True if it succeeds.

        If it fails, return False with a mirror: the remaining members still have all pieces, and
        until they have exchanged them, this member's copies of others' parameters may be a step
        behind. Without a mirror raise ExchangeError.
        """
        try:
            tell()
        except ExchangeError as error:
            if not self.is_mirrored:
                raise
            self.torn = str(error)
        return not self.torn

    def whole_state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return (tensors, metadata) as of whole parameters; requires `holds_all`."""
        tensors, numbers = self._state(self._pieces)
        return {full: value for full, (_, _, value) in tensors.items()}, numbers

    def own_state(self, *, of_mirror: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return (tensors by `SliceName`, metadata) of this member's slice or, with of_mirror, of
        the mirrored slice."""
        return self._named_state(self._mirrored if of_mirror else self._pieces)

    def part_of_model(
        self, model: nn.Module, first_bytes: int, *, of_mirror: bool = False
    ) -> dict[str, Tensor]:
        """Return the part of the model that this member copies, by `ParameterSlice`; of_mirror: the
        part of the member before it.

        These are its slices of parameters, and its share by size of all other tensors. first_bytes:
        the bytes that the first member copies besides.
        """
        pieces = self._mirrored if of_mirror else self._pieces
        by_param = {self._identity(piece.param): piece for piece in pieces}
        rank = self.mirrored_rank if of_mirror else self.rank
        divided = {self._identity(param) for param in self._params}
        tensors = model.state_dict(keep_vars=True)
        whole = {
            name: value for name, value in tensors.items() if self._identity(value) not in divided
        }
        dealt = dealt_out(whole, len(self.owners.parts), first_bytes)[rank]
        named: dict[str, Tensor] = {}
        for place, (name, tensor) in enumerate(tensors.items()):
            piece = by_param.get(self._identity(tensor))
            if name in dealt:
                where = ParameterSlice(place, 0, tuple(tensor.shape), f"{state_format.MODEL}{name}")
                named[str(where)] = tensor.detach()
            elif piece is not None:
                named[piece.name_in(place, name)] = piece.flat.detach()
        return named

    def _identity(self, tensor: Tensor) -> object:
        """Return a key that is equal for all tensors of the model that share memory."""
        if self.held is None and tensor.numel():
            return state_format.storage_key(tensor)
        return id(tensor)

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's tensors that all members hold: all, unless parameters are divided."""
        if self.held is None:
            return state_format.model_state(model)
        by_param = {id(piece.param): piece for piece in self._pieces if self.holds_all}
        divided = {id(param) for param in self._params}
        tensors = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            piece = by_param.get(id(tensor))
            if piece is not None:
                tensors[name] = piece.flat.detach().view(piece.param.shape)
            elif id(tensor) not in divided:
                tensors[name] = tensor.detach()
        return {f"{state_format.MODEL}{name}": tensor for name, tensor in tensors.items()}

    def slices(
        self, model: nn.Module, *, of_mirror: bool
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return `own_state` together with the parameters of the same slice, each under all its
        names; with of_mirror, of the mirrored slice."""
        pieces = self._mirrored if of_mirror else self._pieces
        named, numbers = self._named_state(pieces)
        by_param = {self._identity(piece.param): piece for piece in pieces}
        for place, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
            piece = by_param.get(self._identity(tensor))
            if piece is not None:
                named[piece.name_in(place, name)] = piece.flat.detach()
        return named, numbers

    def _named_state(self, pieces: Sequence[_OwnPiece]) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors, numbers = self._state(pieces)
        named = {}
        for full, (piece, place, value) in tensors.items():
            if value.dim() or piece.part.first == 0:  # of one number per parameter, one copy
                where = SliceName(piece.part.index, place, piece.part.first, full)
                named[str(where)] = value
        return named, numbers

    def load(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Load this member's slice of an optimizer state, which may be empty."""
        self.in_doubt, self.torn = None, ""
        self._load(self._pieces, tensors, metadata)
        if self._mirrored:
            own_state = dict(self.optimizer.state)
            self._load(self._mirrored, tensors, metadata)
            self.optimizer.state.update(own_state)

    def _load(
        self,
        pieces: Sequence[_OwnPiece],
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str],
    ) -> None:
        piece_of = {piece.name: piece for piece in pieces}
        slice_tensors: dict[str, Tensor] = {}
        for full, value in tensors.items():
            name = _parameter_of(full)
            if name not in piece_of and name in self._names:
                continue
            slice_tensors[full] = value
            if name in piece_of and not state_format.is_one_number(full):
                part = piece_of[name].part
                slice_tensors[full] = value.reshape(-1)[part.first : part.stop]
        numbers = {
            full: text
            for full, text in metadata.items()
            if _parameter_of(full) in piece_of or _parameter_of(full) not in self._names
        }
        named = [(piece.name, piece.flat) for piece in pieces]
        state_format.load_optimizer_state(self.optimizer, named, slice_tensors, numbers)

    def _state(
        self, pieces: Sequence[_OwnPiece]
    ) -> tuple[dict[str, tuple[_OwnPiece, int, Tensor]], dict[str, str]]:
        """Return ({full name: (piece, place among its tensors, tensor)}, metadata). Tensors of
        whole parameters have the parameter's shape."""
        placed: dict[str, tuple[_OwnPiece, int, Tensor]] = {}
        numbers: dict[str, str] = {}
        for piece in pieces:
            state, texts = state_format.optimizer_state(self.optimizer, [(piece.name, piece.flat)])
            numbers |= texts
            for place, (full, value) in enumerate(state.items()):
                is_sliced = not state_format.is_one_number(full)
                whole = value.view(piece.param.shape) if is_sliced and piece.is_whole else value
                placed[full] = (piece, place, whole)
        return placed, numbers

    def _step_pieces_only(self) -> None:
        """Replace the parameters by the pieces in the optimizer's groups, together with their
        initial state."""
        by_param: dict[int, list[_OwnPiece]] = {}
        for piece in self._all():
            by_param.setdefault(id(piece.param), []).append(piece)
        before = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            pieces = [piece for p in group["params"] for piece in by_param.get(id(p), ())]
            group["params"] = [piece.flat for piece in pieces]
            for piece in pieces:
                if piece.param in before:
                    self.optimizer.state[piece.flat] = _sliced(before[piece.param], piece)


def make_pieces(
    optimizer: torch.optim.Optimizer,
    params: NamedParams,
    layout: BucketLayout,
    share: StateShare,
    model: nn.Module,
) -> OptimizerPieces:
    """Make the pieces of all parameters that this member's optimizer steps. layout: the layout of
    the gradient buckets."""
    owners, blocks = divide_slices(layout, share.size), None
    if share.is_full:
        trained = {id(param) for _, param in params}
        named = (*model.named_parameters(), *model.named_buffers())
        whole = [(name, tensor) for name, tensor in named if id(tensor) not in trained]
        blocks = GatheredBlocks(params, layers_of(model), owners, whole)
    return OptimizerPieces(
        optimizer, params, owners, share.rank, is_mirrored=share.is_mirrored, blocks=blocks
    )


def _tell_updated(parameters: ParameterTransport) -> None:
    """End a step after which nothing is sent: other members fetch the parameters they need."""
    failpoint("worker.parameters.updated")
    parameters.updated()


def _piece_of(name: str, param: nn.Parameter, part: OwnedPart) -> _OwnPiece:
    view = param.detach().view(-1)[part.first : part.stop]
    return _OwnPiece(name, param, part, nn.Parameter(view))


def _sliced(state: Mapping[str, object], piece: _OwnPiece) -> dict[str, object]:
    def of_piece(key: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if state_format.is_one_number(key):
            return value.clone()  # each of two pieces of a parameter counts its own steps
        return value.reshape(-1)[piece.part.first : piece.part.stop].clone()

    return {key: of_piece(key, value) for key, value in state.items()}


def _parameter_of(full: str) -> str | None:
    """Return the parameter whose optimizer state has this name; None for other names."""
    if not full.startswith(state_format.OPTIMIZER):
        return None
    return full.removeprefix(state_format.OPTIMIZER).rpartition("/")[0]


def _are_all_finite(grads: Sequence[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(grad).all()) for grad in grads if grad is not None)
