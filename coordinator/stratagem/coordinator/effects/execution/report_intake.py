"""Sanitizes the messages of workers: texts of bounded length without control characters, a bounded
number of names, and the sender's own name wherever a message names its worker.

Everything that a worker answers passes here before it becomes a fact, a line of a log or an answer
to a client. The rules are by kind of field and not by message, so that a new field has them, too.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import structlog
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from stratagem.common.base.text import is_printable, printable

MAX_WORD_CHARS: Final = 256
MAX_NAMES: Final = 256
"""Names of metrics, splits and the like in one message, of all its parts together."""

_SPEAKER: Final = "worker_id"
_TRACEBACK: Final = "stratagem.v1.UserError.traceback"
"""Of a long one the end stays: there it says what was raised."""
_LONG: Final = {
    "stratagem.v1.LogLine.text": 8192,
    "stratagem.v1.BuildResult.rows": 8192,
    "stratagem.v1.UserError.message": 10_000,
    _TRACEBACK: 100_000,
}
"""Texts that may be longer than a word, and have lines."""

log = structlog.get_logger()


def let_in(message: Message, worker_id: str = "") -> None:
    """Make a message of a worker fit to be kept and shown, in place.

    worker_id: the sender, whose name replaces any other in the message.
    """
    admission = _Admission(worker_id)
    admission.of(message)
    if admission.num_left_out:
        log.warning(
            "names of a worker are left out",
            worker_id=worker_id,
            number=admission.num_left_out,
            limit=MAX_NAMES,
        )


@dataclass(slots=True)
class _Admission:
    worker_id: str
    names: set[str] = field(default_factory=set)
    num_left_out: int = 0

    def of(self, message: Message) -> None:
        plan = _plan_of(message.DESCRIPTOR)
        for rule in plan.texts:
            text = getattr(message, rule.name)
            if rule.name == _SPEAKER and self.worker_id:
                setattr(message, rule.name, self.worker_id)
            elif text:
                setattr(message, rule.name, rule.applied(text))
        for rule in plan.words:
            words = getattr(message, rule.name)
            if words:
                kept = [rule.applied(word) for word in words[:MAX_NAMES]]
                del words[:]
                words.extend(kept)
        for name in plan.maps:
            self._keep_names(getattr(message, name))
        for name in plan.parts:
            if message.HasField(name):
                self.of(getattr(message, name))
        for name in plan.lists:
            for part in getattr(message, name):
                self.of(part)

    def _keep_names(self, values: MutableMapping[str, Any]) -> None:
        for name in [name for name in values if not self._is_kept(name)]:
            del values[name]
            self.num_left_out += 1
        for name, value in values.items():
            if isinstance(value, str):
                values[name] = printable(value[:MAX_WORD_CHARS], is_line=True)

    def _is_kept(self, name: str) -> bool:
        if name in self.names:
            return True
        if len(self.names) >= MAX_NAMES or len(name) > MAX_WORD_CHARS or not is_printable(name):
            return False
        self.names.add(name)
        return True


@dataclass(frozen=True, slots=True)
class _Rule:
    """The limits that apply to the text in a field."""

    name: str
    limit: int
    has_lines: bool
    keeps_end: bool

    def applied(self, text: str) -> str:
        cut = text[-self.limit :] if self.keeps_end else text[: self.limit]
        return printable(cut, is_line=not self.has_lines)


@dataclass(frozen=True, slots=True)
class _ReportingPlan:
    """The fields of a kind of message that hold text, or messages that may."""

    texts: tuple[_Rule, ...]
    words: tuple[_Rule, ...]
    maps: tuple[str, ...]
    parts: tuple[str, ...]
    lists: tuple[str, ...]


@cache
def _plan_of(descriptor: Descriptor) -> _ReportingPlan:
    fields = list(descriptor.fields)
    strings = [entry for entry in fields if entry.type == FieldDescriptor.TYPE_STRING]
    messages = [entry for entry in fields if entry.message_type is not None]
    maps = [message for message in messages if _entry_of(message) is not None]
    others = [message for message in messages if message not in maps]
    return _ReportingPlan(
        tuple(_rule_of(string) for string in strings if not string.is_repeated),
        tuple(_rule_of(string) for string in strings if string.is_repeated),
        tuple(entry.name for entry in maps if _is_by_name(entry)),
        tuple(other.name for other in others if not other.is_repeated),
        tuple(other.name for other in others if other.is_repeated),
    )


def _rule_of(descriptor: FieldDescriptor) -> _Rule:
    limit = _LONG.get(descriptor.full_name)
    keeps_end = descriptor.full_name == _TRACEBACK
    return _Rule(descriptor.name, limit or MAX_WORD_CHARS, limit is not None, keeps_end)


def _entry_of(descriptor: FieldDescriptor) -> Descriptor | None:
    """Return the type of a map's entries; None for a field that is no map."""
    kind = descriptor.message_type
    return kind if kind is not None and kind.GetOptions().map_entry else None


def _is_by_name(descriptor: FieldDescriptor) -> bool:
    entry = _entry_of(descriptor)
    return entry is not None and entry.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
