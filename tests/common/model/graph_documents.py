"""Parts of graph documents in few words."""

from __future__ import annotations

from typing import Any


def nodes(*ids: str) -> list[dict[str, Any]]:
    return [{"id": each, "module": "Linear"} for each in ids]


def edges(*pairs: str) -> list[dict[str, str]]:
    return [dict(zip(("source", "target"), pair.split(">"), strict=True)) for pair in pairs]
