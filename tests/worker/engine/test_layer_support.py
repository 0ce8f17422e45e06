"""What a device cannot compute in a precision is found by trying, and refused before a run starts.

What this machine's processor can do decides none of these tests: a layer that computes nothing in
16 bits stands for a primitive that a library does not have.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.engine import build_inference
from stratagem.worker.models.build import build_model
from stratagem.worker.models.nodes import program_of
from stratagem.worker.numerics import precision as layer_support
from stratagem.worker.numerics.model import prepare_nodes
from stratagem.worker.numerics.precision import ALL_NUMBERS, KINDS, LayerKind, Numbers, obstacle
from stratagem.worker.numerics.randomness import KeyedRandomness
from tests.every_pair import every_value
from tests.jobs import job
from tests.reference.loops import sharded_loop
from tests.userland.models import Rare
from tests.worker.engine.support import ALLOWED, CPU, evaluating, trainer_of


@pytest.fixture
def rare(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kind of layer that this device lacks primitives for; grows by each trial of one."""
    trials: list[str] = []

    def make() -> nn.Module:
        trials.append("Rare")
        return Rare()

    monkeypatch.setitem(KINDS, "Rare", LayerKind(Rare, make, ((2, 12),)))
    obstacle.cache_clear()
    yield trials
    obstacle.cache_clear()


def plainly(kind: str, numbers: Numbers) -> str | None:
    """The same trial in plain torch."""
    layer = KINDS[kind].make()
    is_mixed = numbers.precision == "Mixed"
    inputs = [torch.randn(shape) for shape in KINDS[kind].inputs]
    if not is_mixed:
        layer, inputs = layer.to(numbers.dtype), [each.to(numbers.dtype) for each in inputs]
    try:
        with torch.autocast("cpu", numbers.dtype, enabled=is_mixed):
            output = layer(*inputs)
        while isinstance(output, tuple):
            output = output[0]
        output.sum().backward()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore")  # torch's, about LSTM with projections
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", ALL_NUMBERS, ids=str)
def test_a_trial_says_what_torch_does_here(kind: str, numbers: Numbers) -> None:
    found, expected = obstacle(kind, numbers, CPU, True), plainly(kind, numbers)
    assert (found is None) == (expected is None)
    assert found is None or expected is None or expected.startswith(found)
    if numbers.precision == "Single":
        assert found is None


@pytest.mark.parametrize(
    "execution",
    [
        {"precision": "Mixed"},
        {"precision": "Mixed", "amp_dtype": "float16"},
        {"precision": "Half", "amp_dtype": "float16", "gradient": {"Checkpointed": 1}},
    ],
    ids=str,
)
def test_a_model_that_needs_what_is_missing_is_refused(
    execution: dict[str, Any], rare: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        trainer_of(job("rare", execution=execution))
    said = str(caught.value)
    dtype = execution.get("amp_dtype", "bfloat16")
    assert said.startswith("execution.precision: this worker's ")
    assert f" cannot compute {execution['precision']} in {dtype}: Rare (0, 2): no primitive" in said
    assert said.endswith("can have Full in float64, Single in float32 there")
    with pytest.raises(InvalidInputError):
        sharded_loop(job("rare", execution=execution), ALLOWED, 1)
    num_tried = len(rare)
    with pytest.raises(InvalidInputError):
        trainer_of(job("rare", execution=execution))
    assert len(rare) == num_tried  # once per process


@pytest.mark.parametrize("precision", ["Single", "Full"])
def test_the_same_model_is_trained_in_what_the_device_has(precision: str, rare: list[str]) -> None:
    trainer_of(job("rare", execution={"precision": precision}))


def test_what_is_missing_to_models_without_such_a_layer_is_not_asked(rare: list[str]) -> None:
    trainer_of(job("mlp", execution={"precision": "Mixed"}))
    assert rare == []


def test_a_model_that_is_only_run_needs_no_gradients(rare: list[str]) -> None:
    """Rare layers have a way forward in bfloat16, and none back."""
    build_inference(
        evaluating("rare", execution={"precision": "Half"}), ALLOWED, device=CPU, fresh=True
    )
    with pytest.raises(InvalidInputError, match="Half in bfloat16"):
        trainer_of(job("rare", execution={"precision": "Half"}))


def test_a_rank_asks_for_its_own_nodes_only(rare: list[str]) -> None:
    spec = job("rare", execution={"precision": "Mixed"})
    model = build_model(spec, ALLOWED, device=CPU, fresh=True)
    program = program_of(model, spec)
    randomness = KeyedRandomness(model, CPU)
    with pytest.raises(InvalidInputError, match=r"Rare \(2\): no primitive"):
        prepare_nodes(model, spec, CPU, randomness, program, foreign={"0"})
    prepare_nodes(model, spec, CPU, randomness, program, foreign={"0", "2"})


def test_memory_that_others_have_taken_says_nothing_about_the_device(
    rare: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    asked = ("Rare", Numbers("Full", torch.float64), CPU, True)
    with monkeypatch.context() as patch:
        patch.setattr(Rare, "forward", full)
        with pytest.raises(torch.OutOfMemoryError):
            obstacle(*asked)
    assert obstacle(*asked) is None


def test_a_device_that_can_do_nothing_at_the_moment_is_asked_again(
    rare: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a CUDA error of somebody else: not even a plain layer in single precision works."""
    broken: dict[str, Any] = {"is": True}

    def computed(*arguments: Any) -> None:
        if broken["is"]:
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(layer_support, "_compute", computed)
    for numbers in (Numbers("Half", torch.bfloat16), Numbers("Full", torch.float64)):
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            obstacle("Rare", numbers, CPU, True)
    broken["is"] = False
    assert obstacle("Rare", Numbers("Half", torch.bfloat16), CPU, True) is None


@pytest.mark.parametrize(("numbers", "kind"), every_value(ALL_NUMBERS, ["Linear", "LSTM"]), ids=str)
def test_the_modes_of_the_caller_do_not_matter(kind: str, numbers: Numbers) -> None:
    obstacle.cache_clear()
    expected = obstacle(kind, numbers, CPU, True)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        obstacle.cache_clear()
        with mode:
            assert obstacle(kind, numbers, CPU, True) == expected


def test_trials_draw_no_random_number() -> None:
    obstacle.cache_clear()
    before = torch.get_rng_state()
    list(layer_support.obstacles(CPU))
    assert torch.equal(torch.get_rng_state(), before)
