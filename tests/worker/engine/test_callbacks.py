"""Callbacks: hooks on modules and gradients with the bits of a loop, and what is refused."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import entry_points
from tests.jobs import NOT_TRAINED, job
from tests.worker.engine.support import assert_equals_loop, assert_same_bits, train, trainer_of

PLACE = "tests.userland.callbacks"
NOISY = f"{PLACE}:Noisy"
CLIPPED = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5}
SLICED: Any = {
    "type": "DataParallel",
    "num_replicas": 2,
    "aggregation": {"method": "AllReduce"},
    "options": {"partition_state": "optimizer"},
}
PIPELINE = {
    "type": "ModelParallel",
    "partitions": [
        {"node_ids": ["0", "1"], "target": {"WorkerId": "a"}},
        {"node_ids": ["2"], "target": {"WorkerId": "b"}},
    ],
    "communication": {"protocol": "Direct"},
}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_hooks_have_the_bits_of_the_loop(num_shards: int) -> None:
    spec = job("dropout_mlp", callbacks=NOISY, optimizer=CLIPPED)
    hooked = assert_equals_loop(spec, num_shards)
    bare = trainer_of(job("dropout_mlp", optimizer=CLIPPED))
    train(bare, num_shards, 5)
    assert hooked.fingerprint() != bare.fingerprint()
    assert entry_points(spec)[-1] == NOISY


def test_a_step_whose_hook_makes_it_infinite_is_treated_like_any_other() -> None:
    spec = job(callbacks=f"{PLACE}:Exploding")
    with pytest.raises(UserCodeError, match="non-finite gradient at step 2"):
        train(trainer_of(spec), 1, 3)
    skipping = job(callbacks=f"{PLACE}:Exploding", accumulation={"non_finite": "skip_step"})
    trainer = trainer_of(skipping)
    train(trainer, 1, 1)
    before = trainer.copy_state()[0]
    train(trainer, 1, 1)
    assert_same_bits(trainer.copy_state()[0], before)


def test_what_a_hook_raises_is_the_users_error() -> None:
    trainer = trainer_of(job(callbacks=f"{PLACE}:Broken"))
    train(trainer, 2, 2)
    before = trainer.copy_state()[0]
    with pytest.raises(UserCodeError, match="no such layer") as caught:
        train(trainer, 2, 1)
    assert caught.value.type == "LookupError"
    assert "tests/userland/callbacks.py" in caught.value.traceback
    assert caught.value.activity == "on_gradients of training step 3"
    assert_same_bits(trainer.copy_state()[0], before)


@pytest.mark.parametrize(
    ("name", "sections", "what"),
    [
        ("Misspelt", {}, "callbacks: on_gradient is no hook; did you mean on_gradients?"),
        ("nothing", {}, "callbacks: .*nothing makes a object without hooks"),
        ("Grows", {}, "callbacks: on_build changed the model's tensors more"),
        (
            "Noisy",
            {"strategy": PIPELINE},
            "callbacks: on_gradients cannot go with strategy.type ModelParallel",
        ),
        (
            "Noisy",
            {"strategy": SLICED},
            "callbacks: on_gradients cannot go with strategy.options.partition_state",
        ),
        (
            "Noisy",
            {**NOT_TRAINED, "evaluation": {"split": "test"}},
            "callbacks: on_gradients is never called: execution.gradient is None",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_the_model_is_built(
    name: str, sections: Any, what: str
) -> None:
    with pytest.raises(InvalidInputError, match=what):
        trainer_of(job(callbacks=f"{PLACE}:{name}", **sections))


def test_hooks_on_modules_are_called_in_evaluations() -> None:
    spec = job(callbacks=NOISY, evaluation={"split": "test", "every": "2 steps"})
    trainer = trainer_of(spec)
    first = trainer.evaluator().part("test", 0)
    assert first == trainer.evaluator().part("test", 0)
    bare = trainer_of(job(evaluation={"split": "test", "every": "2 steps"}))
    assert first.sums != bare.evaluator().part("test", 0).sums
