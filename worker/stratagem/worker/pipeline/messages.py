"""Encode and carry messages between stages: tensors with JSON metadata.

A received tensor has the strides, and the alignment, of the one that was sent: the bits of a matrix
product depend on both. So a cut between two nodes changes no bit.
"""

import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from stratagem.common.base.errors import IntegrityError, InvalidInputError, StaleError
from stratagem.common.tensors.torch_codec import bytes_of, dtype_of, torch_dtype
from stratagem.worker.mesh.link import ExchangeError, MessageLink, PendingTransfer

# ---- Messages and their bytes ----

_MAGIC: Final = b"SGA1"
_PREFIX_BYTES: Final = 8
_ALIGN: Final = 64
MAX_GAP_FACTOR: Final = 1024
"""A view whose storage is more than this many times its size is sent as a contiguous tensor."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one message: its step, sender, receiver and tag.

    `label` names the message independently of ranks: boundary, micro-batch, direction.
    """

    step: int
    source: int
    target: int
    tag: int
    label: str

    def __str__(self) -> str:
        return f"{self.label} of step {self.step} from member {self.source} (tag {self.tag})"


@dataclass(frozen=True, slots=True)
class Message:
    """A message: tensors of any trainable dtype, which may be 0-d or empty, and JSON metadata."""

    tensors: Sequence[Tensor] = ()
    words: Mapping[str, Any] = field(default_factory=dict)


def pack(address: Address, message: Message) -> Tensor:
    """Encode a message as one flat uint8 tensor: header, then each tensor's elements, aligned to 64
    bytes."""
    layouts, payloads, end = [], [], 0
    for tensor in message.tensors:
        layout, compact = _layout_of(tensor)
        layouts.append({**layout, "at": end})
        payloads.append((end, compact))
        end += _padded(compact.nbytes)
    head = {
        "step": address.step,
        "tag": address.tag,
        "label": address.label,
        "tensors": layouts,
        "words": message.words,
    }
    text = json.dumps(head).encode()
    start = _padded(_PREFIX_BYTES + len(text))
    frame = (
        torch.zeros(start, dtype=torch.uint8)
        if not end
        else torch.empty(start + end, dtype=torch.uint8)
    )
    view = bytes_of(frame)
    view[: _PREFIX_BYTES + len(text)] = _MAGIC + len(text).to_bytes(4, "little") + text
    view[_PREFIX_BYTES + len(text) : start] = bytes(start - _PREFIX_BYTES - len(text))
    for at, compact in payloads:
        if compact.nbytes:
            view[start + at : start + at + compact.nbytes] = bytes_of(compact)
    return frame


def unpack(address: Address, frame: memoryview) -> Message:
    """Decode a message into new tensors. Raises IntegrityError if its address is another."""
    try:
        head, start = _read_head(frame)
        for name in ("step", "tag", "label"):
            if head[name] != getattr(address, name):
                text = f"{address}: {name} {head[name]!r} came instead"
                raise IntegrityError(text)
        body = frame[start:]
        return Message([_tensor(layout, body) for layout in head["tensors"]], head["words"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise IntegrityError(f"{address}: not a message of activations: {error}") from error


def _read_head(frame: memoryview) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(frame[4:_PREFIX_BYTES], "little")
    if bytes(frame[:4]) != _MAGIC or _PREFIX_BYTES + size > len(frame):
        raise ValueError("wrong beginning")
    head = json.loads(bytes(frame[_PREFIX_BYTES : _PREFIX_BYTES + size]))
    return head, _padded(_PREFIX_BYTES + size)


def _layout_of(tensor: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return (the tensor's layout in its storage, its distinct elements as a contiguous tensor)."""
    tensor = tensor.detach()
    shape, strides = list(tensor.shape), list(tensor.stride())
    compact = tensor
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if stride == 0 and size > 1:  # expanded: all elements along it are one
            compact = compact.narrow(dim, 0, 1)
    if _overlaps(compact) or _extent(compact.shape, compact.stride()) > MAX_GAP_FACTOR * max(
        compact.numel(), 1
    ):
        compact = compact.contiguous()
        strides = [
            0 if old == 0 else new for old, new in zip(strides, compact.stride(), strict=True)
        ]
    lead = tensor.data_ptr() % _ALIGN // tensor.element_size() if tensor.is_cpu else 0
    layout = {"dtype": dtype_of(tensor), "shape": shape, "strides": strides, "lead": lead}
    return layout, compact.cpu().contiguous()


def _overlaps(tensor: Tensor) -> bool:
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return True
            end = stride * (size - 1) + end
    return False


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of storage elements that a tensor spans; 0 if it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _tensor(layout: Mapping[str, Any], body: memoryview) -> Tensor:
    dtype = torch_dtype(layout["dtype"])
    shape, strides, lead = layout["shape"], layout["strides"], layout["lead"]
    distinct = [
        1 if stride == 0 and size > 1 else size for size, stride in zip(shape, strides, strict=True)
    ]
    numel = math.prod(distinct)
    size_bytes = numel * dtype.itemsize
    at, extent = layout["at"], _extent(distinct, strides)
    whole = [*shape, *strides, lead, at]
    if any(type(value) is not int or value < 0 for value in whole) or lead >= _ALIGN:
        raise ValueError("a negative size")
    if at + size_bytes > len(body) or extent > MAX_GAP_FACTOR * max(numel, 1):
        raise ValueError("a tensor is larger than its message")
    storage = torch.empty(lead + max(extent, 1), dtype=dtype)
    result = storage.as_strided(distinct, strides, lead)
    if numel:
        given = torch.frombuffer(body, dtype=torch.uint8, count=size_bytes, offset=at)
        if result.is_contiguous():
            flat = storage.narrow(0, lead, numel)
            flat.view(torch.uint8).copy_(given)
        else:
            compact = torch.empty(distinct, dtype=dtype)
            compact.view(-1).view(torch.uint8).copy_(given)
            result.copy_(compact)
    return storage.as_strided(shape, strides, lead)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


Skeleton = Any
"""The nesting of a value as JSON, in which tensors are replaced by their numbers."""


def take_apart(value: Any, tensors: list[Tensor]) -> Skeleton:
    """Return the nesting of a value; append its tensors to `tensors`."""
    match value:
        case Tensor():
            tensors.append(value)
            return len(tensors) - 1
        case None | bool() | int() | float() | str():
            return {"value": value}
        case tuple() | list() if type(value) in (tuple, list):
            kind = type(value).__name__
            return {kind: [take_apart(item, tensors) for item in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: take_apart(item, tensors) for key, item in value.items()}}
        case _:
            raise InvalidInputError.at(
                "partitions",
                f"a {type(value).__name__} passes from one stage to another; allowed are tensors, "
                "numbers, text, and tuples, lists and dicts of them",
            )


def put_together(skeleton: Skeleton, tensors: Sequence[Any]) -> Any:
    """Rebuild a value from its nesting and its tensors."""
    if isinstance(skeleton, int):
        return tensors[skeleton]
    ((kind, inner),) = skeleton.items()
    if kind == "value":
        return inner
    if kind == "dict":
        return {key: put_together(item, tensors) for key, item in inner.items()}
    members = [put_together(item, tensors) for item in inner]
    return tuple(members) if kind == "tuple" else members


# ---- Transport between stages ----
#
# A transport belongs to one rank of one membership. It is cut when anything fails and not repaired.


class StageTransport(Protocol):
    """Interface of transports of messages between ranks. Used by one thread, except `cut`."""

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        """Begin a pass: accept each of the awaited messages once, and none of older steps."""

    def send(self, address: Address, message: Message) -> None:
        """Send a message without waiting; it must not be changed afterwards."""

    def recv(self, address: Address, timeout_s: float) -> Message:
        """Receive one message. Raises ExchangeError with message's name, sender and cause."""

    def end(self, timeout_s: float) -> None:
        """End the pass: return once none of its messages is in transfer any more."""

    def cut(self) -> None:
        """Make every wait fail soon, here and at the other ranks. May be called from any thread."""


class LocalPost:
    """In-memory store of messages between ranks of one process; tensors are not copied."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._messages: dict[Address, Message] = {}
        self._steps = [-1] * size
        self._received: list[set[Address]] = [set() for _ in range(size)]
        self._end = ""

    def begin(self, rank: int, step: int) -> None:
        with self._changed:
            self._steps[rank], self._received[rank] = step, set()

    def put(self, address: Address, message: Message) -> None:
        with self._changed:
            self._check_open()
            if address.step < self._steps[address.target]:
                raise StaleError(f"{address}: member {address.target} is at a later step")
            if address in self._messages or address in self._received[address.target]:
                raise ExchangeError(f"{address} was sent twice")
            self._messages[address] = message
            self._changed.notify_all()

    def take(self, address: Address, timeout_s: float) -> Message:
        with self._changed:
            self._changed.wait_for(lambda: address in self._messages or self._end, timeout_s)
            self._check_open()
            if address not in self._messages:
                raise ExchangeError(f"receive of {address}: nothing within {timeout_s:g} s")
            self._received[address.target].add(address)
            return self._messages.pop(address)

    def cut(self) -> None:
        with self._changed:
            self._end = "the party was cut"
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._end:
            raise ExchangeError(self._end)


class LocalTransport:
    """Transport of one rank over a `LocalPost`."""

    def __init__(self, post: LocalPost, rank: int) -> None:
        self._post, self._rank = post, rank

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        self._post.begin(self._rank, step)

    def send(self, address: Address, message: Message) -> None:
        self._post.put(address, message)

    def recv(self, address: Address, timeout_s: float) -> Message:
        return self._post.take(address, timeout_s)

    def end(self, timeout_s: float) -> None:
        return

    def cut(self) -> None:
        self._post.cut()


# ---- Transport over a link ----
#
# A link carries each message as one run of bytes; it is PeerService (`mesh/grpc.py`) or memory of
# one host (`mesh/shm_messages.py`). The mailbox keeps messages that arrive early, and refuses stale
# ones and those that come twice.


class PeerTransport:
    """Transport of one rank over a message link, in which member i is rank i."""

    def __init__(self, link: MessageLink) -> None:
        self._link = link
        self._sends: list[PendingTransfer] = []

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        self._link.open_step(step, [(message.source, message.tag) for message in awaited])

    def send(self, address: Address, message: Message) -> None:
        frame = pack(address, message)
        self._sends.append(self._link.send(address.target, address.tag, frame, address.step))

    def recv(self, address: Address, timeout_s: float) -> Message:
        frame = self._link.take(address.source, address.step, address.tag, timeout_s)
        return unpack(address, frame)

    def end(self, timeout_s: float) -> None:
        for work in self._sends:
            work.wait(timeout_s)
        self._sends.clear()

    def cut(self) -> None:
        self._link.cut()
