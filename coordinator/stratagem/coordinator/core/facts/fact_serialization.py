"""Conversion of facts to and from their form in the journal, also in that of earlier versions.

Adding an optional field to a fact keeps SCHEMA_VERSION; changing a meaning raises it and adds an
entry to UPGRADES.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.coordinator.core.facts import KINDS, Fact

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
    payload = json.loads(payload_json)
    for version in range(schema_version, SCHEMA_VERSION):
        upgrade = UPGRADES.get((kind, version))
        payload = upgrade(payload) if upgrade else payload
    return KINDS[kind].model_validate(payload)
