"""Losses, metrics, optimizers, schedules, keyed randomness, evaluation, fingerprint, examples."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import ExecutionSpec, LossSpec, OptimizerSpec
from stratagem.common.job.fields import FROM_LOSS, LOSSES, METRICS, RETURNED
from stratagem.worker.engine.optimizers import make_optimizer
from stratagem.worker.models.program import draws_random_numbers
from stratagem.worker.numerics.randomness import (
    KeyedRandomness,
    numerics_fingerprint,
    processor_name,
)
from stratagem.worker.objectives.evaluator import _METRICS, make_metrics
from stratagem.worker.objectives.objective import _LOSSES, make_loss
from stratagem.worker.plans.build import check_supported
from tests.jobs import job, user_model
from tests.userland.data import classes
from tests.worker.engine.support import ALLOWED, CPU, evaluated, train, trainer_of


def loss(spec: Any) -> Any:
    return make_loss(LossSpec.model_validate(spec), ALLOWED)


def test_losses() -> None:
    x, y = torch.randn(6, 3), torch.arange(6) % 3
    value = loss("cross_entropy")(x, y, 6)
    assert (value.mean, value.weight) == (nn.functional.cross_entropy(x, y), 6)
    smooth = loss({"name": "cross_entropy", "kwargs": {"label_smoothing": 0.1}})(x, y, 6).mean
    assert smooth == nn.functional.cross_entropy(x, y, label_smoothing=0.1)
    assert loss("nll")(x.log_softmax(1), y, 6).mean.item() == pytest.approx(value.mean.item())
    assert loss("mse")(x, x + 2, 6).mean == pytest.approx(4.0)
    assert loss("l1")(x, x + 2, 6).mean == pytest.approx(2.0)
    logits = loss({"name": "bce_with_logits", "kwargs": {"pos_weight": 2.0}})
    assert logits(torch.zeros(2), torch.tensor([1, 0]), 2).mean == pytest.approx(1.0397, abs=1e-4)
    with pytest.raises(ValueError, match="shape"):
        loss("mse")(x, y, 6)


def test_what_torch_refuses_of_a_loss_is_told_with_what_it_was_given() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0, 2, -100])
    given = r"got outputs float32\[3, 2\] and targets int64\[3\]"
    for name in ("cross_entropy", "nll", "token_cross_entropy"):
        with pytest.raises(IndexError) as caught:
            loss(name)(x, y, 3)
        sentence = (
            "Target 2 is out of bounds: the model has 2 outputs, so targets are 0 to 1; those of "
            f"this batch are 0 to 2. {name} {given}"
        )
        assert re.fullmatch(sentence, str(caught.value))
    with pytest.raises(ValueError, match=r"same shape; l1 got outputs .*3, 2\] and targets int64"):
        loss("l1")(x, y, 3)
    with pytest.raises(RuntimeError, match=r"cross_entropy got outputs .* int64\[3, 2\]$"):
        loss("cross_entropy")(x, torch.zeros(3, 2, dtype=torch.int64), 3)


@pytest.mark.parametrize(
    ("name", "output", "target", "hint"),
    [
        ("cross_entropy", [2, 6, 50], torch.zeros(2, 6).long(), "for `loss: token_cross_entropy`"),
        ("nll", [2, 6, 50], torch.zeros(2, 6).long(), "for `loss: token_cross_entropy`"),
        ("cross_entropy", [4, 3], torch.zeros(4), "class numbers are int64: y.long()"),
        ("cross_entropy", [4, 3], torch.zeros(4, 1).long(), "y.squeeze(1)"),
        ("token_cross_entropy", [2, 6, 5], torch.zeros(3, 5).long(), "have the shape [2, 6]"),
        ("mse", [4, 1], torch.zeros(4), "reshape y to [4, 1]"),
        ("bce_with_logits", [4], torch.zeros(4, 1), "reshape y to [4]"),
        ("mse", [4, 3], torch.zeros(4), "for `loss: cross_entropy`"),
        ("mse", None, torch.zeros(4), "returns a dict: return its tensor alone"),
        ("mse", [4], {"y": torch.zeros(4)}, "return pairs (x, y) as rows"),
    ],
)
def test_what_to_write_instead_of_the_wrong_loss(
    name: str, output: list[int] | None, target: Any, hint: str
) -> None:
    given: Any = {"logits": torch.zeros(4)} if output is None else torch.zeros(output)
    with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError)) as caught:
        loss(name)(given, target, 4)
    assert f"{name} got outputs " in str(caught.value)
    assert hint in str(caught.value)


def test_token_loss_counts_tokens() -> None:
    x, y = torch.randn(2, 3, 4), torch.tensor([[1, -100, 2], [-100, -100, 0]])
    value = loss("token_cross_entropy")(x, y, 2)
    assert value.weight == 3
    expected = nn.functional.cross_entropy(x.flatten(0, 1), y.flatten())
    torch.testing.assert_close(value.mean, expected)
    nothing = loss("token_cross_entropy")(x, torch.full_like(y, -100), 2)
    assert (nothing.mean.item(), nothing.weight) == (0.0, 0)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {RETURNED}))
def test_the_table_of_losses_says_what_each_takes(name: str) -> None:
    x = torch.rand(6, 3)
    y = torch.arange(6) % 3 if name in ("cross_entropy", "token_cross_entropy", "nll") else x
    values = {"label_smoothing": 0.1, "ignore_index": 1, "pos_weight": [1.0, 2.0, 3.0]}
    kwargs = {key: values[key] for key in LOSSES[name]}
    plain = loss(name)(x, y, 6)
    assert math.isfinite(plain.mean)
    for key, value in kwargs.items():
        assert loss({"name": name, "kwargs": {key: value}})(x, y, 6) != plain


def test_the_tables_of_names_are_those_of_the_functions() -> None:
    assert set(LOSSES) == {*_LOSSES, RETURNED}
    assert set(METRICS) == {*_METRICS, *FROM_LOSS}


def test_a_loss_for_each_row_is_refused() -> None:
    with pytest.raises(ValueError, match="one number"):
        loss("tests.userland.losses:one_per_row")(torch.zeros(3), torch.zeros(3), 3)


def test_metrics() -> None:
    metrics = make_metrics(
        ["accuracy", "top5_accuracy", "mse", "mae", "perplexity", "loss"], ALLOWED
    )
    assert set(metrics) == {"accuracy", "top5_accuracy", "mse", "mae"}
    x = torch.eye(8)
    y = torch.tensor([0, 1, 2, 3, 0, 0, 0, -100])
    assert metrics["accuracy"](x, y, 8) == pytest.approx((4 / 7, 7))
    assert metrics["accuracy"](x.view(2, 4, 8), y.view(2, 4), 2) == pytest.approx((4 / 7, 7))
    images = x.view(2, 4, 8).movedim(-1, 1)
    assert metrics["accuracy"](images, y.view(2, 4), 2) == pytest.approx((4 / 7, 7))
    assert metrics["accuracy"](torch.tensor([1.0, -1.0]), torch.tensor([1, 1]), 2) == (0.5, 2)
    assert metrics["top5_accuracy"](torch.rand(4, 3), torch.arange(4) % 3, 4) == (1.0, 4)
    assert metrics["mse"](x, x + 2, 8) == (4.0, 8)
    assert metrics["mae"](x, x - 2, 8) == (2.0, 8)
    user = make_metrics(["tests.userland.losses:confidence"], ALLOWED, 2)
    assert next(iter(user.values()))(torch.zeros(4, 2), y, 4) == (0.5, 4.0)


def optimizer(**spec: Any) -> torch.optim.Optimizer:
    params = [("weight", nn.Parameter(torch.zeros(2)))]
    return make_optimizer(OptimizerSpec.model_validate({"lr": 0.1, **spec}), params)


SIZES = (0, 1, 7, 17, 33, 40_003)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def updated(
    make: Make, *, num_threads: int = 1, lead: int = 0, alone: bool = False
) -> list[Tensor]:
    """Parameters of SIZES after three updates; their storage begins `lead` elements early."""
    draw = torch.Generator().manual_seed(0)

    def placed(size: int) -> Tensor:
        return torch.empty(size + lead)[lead:].copy_(torch.randn(size, generator=draw))

    params = [nn.Parameter(placed(size)) for size in SIZES]
    optimizers = [make(part) for part in ([[param] for param in params] if alone else [params])]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for _ in range(3):
            for param in params:
                param.grad = placed(len(param))
            for each in optimizers:
                each.step()
    finally:
        torch.set_num_threads(before)
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_an_update_in_one_pass_depends_on_nothing_but_its_tensor(name: str) -> None:
    spec = OptimizerSpec.model_validate({"name": name, "lr": 0.1, "weight_decay": 0.01})

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(spec, [(str(i), param) for i, param in enumerate(params)])

    found = updated(make)
    for others in (
        updated(make, num_threads=3),
        updated(make, lead=3),
        updated(make, num_threads=2, alone=True),
    ):
        assert all(torch.equal(mine, other) for mine, other in zip(found, others, strict=True))
    plain = updated(partial(getattr(torch.optim, name), lr=0.1, weight_decay=0.01, foreach=False))
    for mine, other in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, other)


def test_wrong_optimizers_are_refused() -> None:
    assert optimizer(name="Adam", betas=[0.8, 0.9]).param_groups[0]["betas"] == (0.8, 0.9)
    with pytest.raises(InvalidInputError, match="did you mean momentum"):
        optimizer(name="sgd", momentumm=0.9)
    with pytest.raises(InvalidInputError, match="Invalid beta"):
        optimizer(name="adam", betas=[2.0, 0.9])
    with pytest.raises(ValidationError, match="'lbfgs' is not one of adadelta, "):
        optimizer(name="lbfgs")


def test_masks_do_not_depend_on_who_computes_them() -> None:
    """A member that owns shard 2 only draws what a member that owns all draws for shard 2."""

    def masks(shards: list[int]) -> dict[int, torch.Tensor]:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
        randomness = KeyedRandomness(model, CPU)
        drawn = {}
        for shard in shards:
            torch.rand(shard + 3)  # whatever came before must not matter
            randomness.begin(3, 17, shard, 0)
            drawn[shard] = model[2](torch.ones(50)) + 10 * model[0](torch.ones(50))
        return drawn

    everything, alone = masks([0, 1, 2]), masks([2])
    assert torch.equal(everything[2], alone[2])
    assert not torch.equal(everything[1], everything[2])


def test_calls_of_one_module_draw_differently_and_hooks_can_rest() -> None:
    dropout = nn.Dropout(0.5)
    randomness = KeyedRandomness(dropout, CPU)
    randomness.begin(1)
    first, second = dropout(torch.ones(64)), dropout(torch.ones(64))
    assert not torch.equal(first, second)
    randomness.begin(1)
    assert torch.equal(dropout(torch.ones(64)), first)
    randomness.end()
    torch.manual_seed(0)
    plain = nn.functional.dropout(torch.ones(64))
    torch.manual_seed(0)
    assert torch.equal(dropout(torch.ones(64)), plain)


def test_which_modules_draw() -> None:
    assert draws_random_numbers(nn.Dropout2d())
    assert draws_random_numbers(nn.LSTM(2, 2, num_layers=2, dropout=0.1))
    assert not draws_random_numbers(nn.LSTM(2, 2))
    assert draws_random_numbers(nn.MultiheadAttention(4, 2, dropout=0.1))
    assert not draws_random_numbers(nn.Linear(2, 2))

    class Own(nn.Module):
        pass

    assert draws_random_numbers(Own())


@pytest.mark.parametrize("num_shards", [1, 3])
def test_activation_checkpointing_draws_the_same_masks_again(num_shards: int) -> None:
    losses = []
    for checkpointed in (False, True):
        model = user_model("shared_blocks", is_checkpointed=checkpointed)
        losses.append(train(trainer_of(job(model)), num_shards, 6))
    assert losses[0] == losses[1]


def test_evaluation_does_not_depend_on_who_evaluates_what() -> None:
    evaluation = {"split": "test", "metrics": ["accuracy"], "batch_size": 4}
    trainer = trainer_of(job("batch_norm_mlp", evaluation=evaluation, batch_size=25))
    train(trainer, 2, 2)
    before = trainer.fingerprint()
    alone = evaluated(trainer)
    shared = [part for rank in range(3) for part in evaluated(trainer, rank=rank, size=3)]
    assert sorted(shared, key=lambda part: part.batch) == alone
    assert [part.weight for part in alone] == [4, 4, 4, 4, 4, 3]
    assert trainer.fingerprint() == before
    x, y = classes()["test"]
    with torch.no_grad():
        output = trainer.model.eval()(x)
    correct = int((output.argmax(1) == y).sum())
    assert sum(part.sums["accuracy"] for part in alone) == pytest.approx(correct)
    mean = sum(part.sums["loss"] for part in alone) / 23
    assert mean == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-5)
    with pytest.raises(InvalidInputError, match="there is train, test"):
        evaluated(trainer, "validation")


def test_processors_of_two_kinds_have_two_names() -> None:
    core = "processor : {}\nCPU implementer : 0x41\nCPU variant : 0x1\nCPU part : {}\n\n"
    graviton_3 = core.format(0, "0xd40") + core.format(1, "0xd40")
    mixed = core.format(0, "0xd46") + core.format(1, "0xd40")
    assert processor_name("processor : 0\nmodel name\t: AMD EPYC\n") == "AMD EPYC"
    assert processor_name(graviton_3) == "arm64 0x41/0xd40/0x1"
    assert processor_name(mixed) == "arm64 0x41/0xd40/0x1 0x41/0xd46/0x1"
    assert processor_name("processor : 0\n") == ""


def test_fingerprint_names_what_decides_the_bits() -> None:
    digest, description = numerics_fingerprint(CPU)
    assert len(digest) == 16
    assert f"torch {torch.__version__}" in description
    assert "threads 1" in description
    assert numerics_fingerprint(CPU) == (digest, description)


def test_what_a_worker_does_not_carry_out_is_named() -> None:
    check_supported(ExecutionSpec(precision="Full", deterministic=False))
    with pytest.raises(InvalidInputError) as raised:
        check_supported(ExecutionSpec.parse({"parallelism": "Automatic"}))
    assert "execution.parallelism: Automatic is not carried out" in str(raised.value)
