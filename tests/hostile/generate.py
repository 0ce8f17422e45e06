"""Messages that no honest caller would send, made from their descriptors by hypothesis."""

from __future__ import annotations

import json
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

DIGEST: Final = "0123456789abcdef" * 4

TEXTS: Final = (
    "",
    "nobody",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../../b",
    "a//b",
    "x" * 70_000,
    "nul\x00nul",
    "\x1b[31mred\r\nINFO  a line of its own",
    "\u202eright to left",
    "\U0001f9e8" * 3000,
    "²",
    "9" * 5000,
    "-1",
    "1e999",
    "NaN",
    "final",
    DIGEST,
    DIGEST.upper(),
    f"../../{DIGEST}",
    "127.0.0.1:1",
    "unix:/tmp/x:1",
    "dns://127.0.0.1:53/x:1",
    "[::1",
    "{}",
    "null",
    "[" * 100_000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"name": "a", "name": "b"}',
    json.dumps({"name": "x", "seed": 10**400}),
    "9" * 4301,
    "\ud7ff\ue000\ufffe\uffff",
)
_INTS: Final = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
MAX_REPEATED: Final = 5 * 2**20
"""Characters of one repeated field: more than a server takes in a message, and not gigabytes."""
_DOUBLES: Final = (0.0, -0.0, -1.0, 1.0, 1e308, -1e308, 5e-324, float("inf"), float("nan"))
_BOUNDS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def messages(kind: Any) -> st.SearchStrategy[bytes]:
    """Messages of a class, as their bytes."""
    return _messages(kind.DESCRIPTOR).map(lambda message: message.SerializeToString())


def conversations(kind: Any) -> st.SearchStrategy[list[bytes]]:
    """Some messages one after the other, now and then glued: fields stand twice in one message."""
    one = st.one_of(messages(kind), st.lists(messages(kind), min_size=2, max_size=2).map(b"".join))
    return st.lists(one, min_size=1, max_size=4)


def damaged(valid: list[bytes]) -> st.SearchStrategy[list[bytes]]:
    """A valid conversation of which one message is cut, flipped, repeated, gone or out of order."""

    @st.composite
    def damage(draw: Any) -> list[bytes]:
        frames = list(valid)
        index = draw(st.integers(0, len(frames) - 1))
        frame = frames[index]
        at = draw(st.integers(0, max(len(frame) - 1, 0)))
        match draw(st.sampled_from(("cut", "flip", "insert", "repeat", "remove", "swap"))):
            case "cut":
                frames[index] = frame[:at]
            case "flip" if frame:
                bit = draw(st.integers(0, 7))
                frames[index] = frame[:at] + bytes([frame[at] ^ 1 << bit]) + frame[at + 1 :]
            case "insert":
                frames[index] = frame[:at] + draw(st.binary(max_size=20)) + frame[at:]
            case "repeat":
                frames.insert(index, frame)
            case "remove":
                del frames[index]
            case _:
                frames.reverse()
        return frames

    return damage()


def noise() -> st.SearchStrategy[list[bytes]]:
    """Bytes that mean nothing."""
    return st.lists(st.binary(max_size=300), min_size=1, max_size=3)


@st.composite
def _messages(draw: Any, descriptor: Any) -> Any:
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.containing_oneof is not None and not draw(st.booleans()):
            continue
        if draw(st.integers(0, 4)) == 0:
            continue
        _fill(draw, message, field)
    return message


def _fill(draw: Any, message: Any, field: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        target, value = getattr(message, field.name), field.message_type.fields_by_name["value"]
        for key in draw(st.lists(_texts(), max_size=3)):
            target[key] = draw(_scalars(value))
    elif field.is_repeated:
        _extend(draw, getattr(message, field.name), field)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(draw(_messages(field.message_type)))
    else:
        setattr(message, field.name, draw(_scalars(field)))


def _extend(draw: Any, target: Any, field: Any) -> None:
    if field.message_type is not None:
        target.extend(draw(st.lists(_messages(field.message_type), max_size=2)))
        return
    values = draw(st.lists(_scalars(field), max_size=3))
    if values and draw(st.integers(0, 9)) == 0:
        size = sum(len(each) if isinstance(each, bytes | str) else 1 for each in values)
        values *= min(3000, max(1, MAX_REPEATED // max(1, size)))
    target.extend(values)


def _scalars(field: Any) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from(_DOUBLES)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.one_of(st.binary(max_size=20), st.just(b"\0" * 100_000))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return _texts()
    low, high = _BOUNDS[kind]
    return st.sampled_from([each for each in _INTS if low <= each <= high])


def _texts() -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))


MANY = settings(
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
