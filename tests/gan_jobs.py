"""Jobs with turns: a small GAN, whose discriminator and generator have an optimizer each."""

from typing import Any

ADAM = {"name": "adam", "lr": 0.02, "betas": [0.5, 0.9], "clip_norm": 0.5}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "cosine"}
TURNS = [
    {"name": "d", "params": "disc.*", "step": "tests.userland.gans:step_disc", "optimizer": ADAM},
    {"name": "g", "params": ["gen.*"], "step": "tests.userland.gans:step_gen", "optimizer": SGD},
]


def gan(**changes: Any) -> dict[str, Any]:
    """The sections of such a job."""
    data = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 44}}
    return {
        "model": {"entrypoint": "tests.userland.gans:Gan"},
        "data": data,
        "loss": None,
        "optimizer": None,
        "turns": TURNS,
        **changes,
    }
