"""A schedule's state as JSON text and back, exactly: Python writes floats so that they read back.

The text travels with checkpoints and to members that join, and stands in the fingerprint.
"""

import json
from dataclasses import asdict
from typing import Any

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.phases.loss_history import LossHistory
from stratagem.worker.phases.phase_adaptation import Lengths
from stratagem.worker.phases.phase_schedule import NUM_LOSSES, Counts, Quality, State, TrainingPhase


def dump_state(state: State) -> str:
    """Returns the state as compact JSON; equal states, equal text."""
    plain = asdict(state)
    for name in ("full_losses", "correct_losses"):
        plain[name] = list(getattr(state, name).losses)
    return json.dumps(plain, separators=(",", ":"))


def load_state(text: str) -> State:
    """Returns the state of a text that `dump_state` wrote. Raises InvalidInputError for any
    other."""
    try:
        return _read(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInputError.at("state.phases/schedule", f"is not readable: {error}") from error


def _read(plain: dict[str, Any]) -> State:
    check = plain["last_check"]
    special = {
        "lengths": Lengths(*plain["lengths"]),
        "phase": TrainingPhase(plain["phase"]),
        "counts": Counts(*plain["counts"]),
        "last_check": None if check is None else Quality(*check),
        "full_losses": _losses(plain["full_losses"]),
        "correct_losses": _losses(plain["correct_losses"]),
    }
    return State(**{**plain, **special})


def _losses(values: list[float]) -> LossHistory:
    return LossHistory(tuple(values), NUM_LOSSES)
