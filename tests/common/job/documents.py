"""The documents of jobs, as users write them, that several tests change."""

from __future__ import annotations

from typing import Any

MINIMAL: dict[str, Any] = {
    "name": "digits",
    "model": {"entrypoint": "examples.digits:build_model"},
    "data": {"entrypoint": "examples.digits:load"},
    "loss": "cross_entropy",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 5,
    "batch_size": 64,
}
