"""The file beside a target that says how much of a run is in it."""

import json
import os
from pathlib import Path

from stratagem.client.sinks.contract import Cursor


def cursor_path(target: Path, run_id: str) -> Path:
    """Return where the cursor of a run is, beside the file or folder that it is written to."""
    return target.with_name(f".stratagem-{run_id}-{target.name}.json")


def read_cursor(path: Path) -> Cursor | None:
    """Return the cursor; None where there is none that can be read."""
    try:
        kept = json.loads(path.read_text())
        steps = {str(name): int(step) for name, step in kept["steps"].items()}
        return Cursor(int(kept["event_index"]), steps, int(kept["size"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_cursor(path: Path, cursor: Cursor) -> None:
    """Replace the cursor, whole or not at all."""
    text = json.dumps(
        {"event_index": cursor.event_index, "steps": dict(cursor.steps), "size": cursor.size}
    )
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
