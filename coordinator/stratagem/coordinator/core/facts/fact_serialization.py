"""Conversion of facts to and from their form in the journal, also in that of earlier versions.

Adding an optional field to a fact keeps SCHEMA_VERSION; changing a meaning raises it and adds an
entry to UPGRADES.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from pydantic import ValidationError

from stratagem.coordinator.core.facts import KINDS, Fact, Value

SCHEMA_VERSION = 1

UPGRADES: Mapping[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(kind, schema version) -> the payload in the next version; absent: that did not change it."""


def encode(fact: Fact) -> tuple[str, str]:
    """Return the kind of a fact, and its payload as JSON."""
    return type(fact).__name__, fact.model_dump_json()


def decode(kind: str, schema_version: int, payload_json: str) -> Fact:
    """Return the fact of a journal entry written by this or an earlier version. Raises ValueError
    for a newer one."""
    if kind not in KINDS or schema_version > SCHEMA_VERSION:
        raise ValueError(
            f"the journal holds {kind} of schema {schema_version}, written by a newer version; "
            f"this one knows schemas up to {SCHEMA_VERSION}"
        )
    if schema_version == SCHEMA_VERSION:
        try:
            return KINDS[kind].model_validate_json(payload_json)  # in half of the time
        except ValidationError:
            pass  # halves of surrogates are no text for it, and they may have been written
    payload = json.loads(payload_json)
    for version in range(schema_version, SCHEMA_VERSION):
        upgrade = UPGRADES.get((kind, version))
        payload = upgrade(payload) if upgrade else payload
    return KINDS[kind].model_validate(payload)


def _may_lack_parts(annotation: Any) -> bool:
    """Return whether a value of this type may have been written before one of its fields was."""
    if isinstance(annotation, type) and issubclass(annotation, Value):
        parts = annotation.model_fields.values()
        return any(not part.is_required() or _may_lack_parts(part.annotation) for part in parts)
    return any(map(_may_lack_parts, get_args(annotation)))


_FLAT: Final = {
    kind: len(fact.model_fields)
    for kind, fact in KINDS.items()
    if not any(_may_lack_parts(field.annotation) for field in fact.model_fields.values())
}
"""Number of fields, of the kinds of facts whose fields say whether they are whole."""


def payload_now(kind: str, fact: Fact, stored: str) -> str:
    """Return the payload of a fact that is stored so as this version writes it: the stored text
    itself, unless fields were added since, or it holds null, which was once written for NaN."""
    is_whole = len(fact.model_fields_set) == _FLAT.get(kind) and "null" not in stored
    return stored if is_whole else fact.model_dump_json()
