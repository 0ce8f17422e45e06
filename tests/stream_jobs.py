"""The data sections of jobs whose rows come as streams."""

from typing import Any

JITTERED = "tests.userland.data:jittered"
NAMED = "tests.userland.streams:named"


def streamed(kind: str, collate: str = JITTERED, **settings: Any) -> dict[str, Any]:
    given = [key for key in ("streams", "shuffle_rows") if key in settings]
    sections: dict[str, Any] = {key: settings.pop(key) for key in given}
    entrypoint = f"tests.userland.streams:{kind}"
    return {"entrypoint": entrypoint, "collate": collate, "kwargs": settings, **sections}
