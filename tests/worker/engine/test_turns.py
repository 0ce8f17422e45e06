"""Several optimizers that take turns in each step, against the loop that spells it out."""

from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.worker.engine import Tally, Trainer
from stratagem.worker.exchange import ExchangeError
from tests.cluster.jobs import data_parallel, model_parallel
from tests.gan_jobs import ADAM, SGD, TURNS, gan
from tests.jobs import document, job
from tests.reference.turns_loop import turns_loop
from tests.worker.engine.support import (
    ALLOWED,
    assert_goes_on,
    assert_same_bits,
    evaluated,
    in_buckets,
    model_of,
    solo,
    train,
    trainer_of,
)

PLATEAU = {"name": "plateau", "metric": "loss", "mode": "min"}
BROUGHT = {
    "entrypoint": "tests.userland.optimizers:SignMomentum",
    "lr": 0.01,
    "schedule": "cosine",
    "groups": [{"name": "head", "match": ["disc.3.*"], "optimizer": {"name": "adamw", "lr": 0.01}}],
}
"""Two optimizers in one turn, one of them the user's."""


def silos(inner: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "Federated",
        "num_clients": 2,
        "rounds": 2,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
        "options": {"inner": inner},
    }


@pytest.mark.parametrize(
    ("num_shards", "accumulation"), [(1, {"steps": 2}), (2, None), (3, {"steps": 2})], ids=str
)
def test_equals_the_loop_to_the_bit(num_shards: int, accumulation: Any) -> None:
    spec = job(**gan(accumulation=accumulation))
    made = trainer_of(spec)
    exchange = solo(made, num_shards)
    reports = [made.train_step(exchange, range(num_shards), num_shards) for _ in range(6)]
    expected = turns_loop(spec, ALLOWED, num_shards, 6)
    assert_same_bits(model_of(made), dict(expected.state))
    for report, losses in zip(reports, expected.logged, strict=True):
        assert {n: report.logged[n] for n in losses} == losses
    assert reports[0].logged.keys() == {"loss.d", "loss.g", "real.d"}
    tally = Tally()
    for report in reports:
        tally.add(report)
    assert made.end_segment(exchange, tally).metrics.keys() >= {"loss.d", "loss.g", "real.d"}


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
def test_turns_in_16_bits_share_the_scale_of_the_loss(amp_dtype: str) -> None:
    """It is halved in whichever turn the gradient is not finite, and only that one is skipped."""
    steps = ("tests.userland.gans:huge_disc", TURNS[1]["step"])
    turns = [{**turn, "step": step} for turn, step in zip(TURNS, steps, strict=True)]
    execution = {"precision": "Mixed", "amp_dtype": amp_dtype}
    spec = job(**gan(turns=turns, execution=execution))
    made = trainer_of(spec)
    exchange = solo(made, 2)
    reports = [made.train_step(exchange, range(2), 2) for _ in range(6)]
    assert_same_bits(model_of(made), dict(turns_loop(spec, ALLOWED, 2, 6).state))
    num_skipped = [report.num_skipped for report in reports]
    assert any(num_skipped) == (amp_dtype == "float16")
    assert max(num_skipped) <= 1
    assert not num_skipped[-1]


@pytest.mark.parametrize("failing", range(4))
def test_a_step_that_fails_in_any_turn_leaves_no_trace(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step, in which nothing has moments yet, and the second one."""
    made, undisturbed = trainer_of(job(**gan())), trainer_of(job(**gan()))
    exchange = in_buckets(made, 2)
    finish, count = exchange.finish, 0

    def fail() -> Any:
        nonlocal count
        count += 1
        if count == failing + 1:
            raise ExchangeError("lost")
        return finish()

    monkeypatch.setattr(exchange, "finish", fail)
    for _ in range(failing // 2):
        made.train_step(exchange, range(2), 2)
    before = made.fingerprint()
    with pytest.raises(ExchangeError):
        made.train_step(exchange, range(2), 2)
    assert made.fingerprint() == before
    assert made.step == failing // 2
    assert all(param.requires_grad for _, param in made.params)
    again = in_buckets(made, 2)
    while made.step < 4:
        made.train_step(again, range(2), 2)
    train(undisturbed, 2, 4)
    assert made.fingerprint() == undisturbed.fingerprint()


@pytest.mark.parametrize("of_disc", [ADAM, BROUGHT], ids=["torch's", "brought"])
def test_a_resumed_run_equals_the_undisturbed_one(of_disc: dict[str, Any]) -> None:
    spec = job(**gan(turns=[{**TURNS[0], "optimizer": of_disc}, TURNS[1]]))
    names, _ = assert_goes_on(spec, 3, 3, 6)
    own = "mean" if of_disc is BROUGHT else "exp_avg"
    assert f"optimizer/disc.0.weight/{own}" in names
    assert "optimizer/disc.3.weight/exp_avg" in names
    assert "optimizer/gen.0.weight/momentum_buffer" in names


def test_an_evaluation_has_the_sum_of_the_losses_and_metrics_of_predict() -> None:
    spec = job(
        **gan(
            predict="tests.userland.gans:prediction",
            evaluation={"metrics": ["accuracy"], "every": "3 steps"},
        )
    )
    (part,) = evaluated(trainer_of(spec))
    assert part.weight == 23
    assert part.sums["loss"] > 0
    assert 0 <= part.sums["accuracy"] <= 23


def test_turns_and_an_average() -> None:
    spec = job(**gan(weight_average={"kind": "ema", "decay": 0.5}))
    made = trainer_of(spec)
    train(made, 2, 3)
    names = made.state()[0].keys()
    assert any("gen.0.weight" in name and "average" in name for name in names)


def _refusal(made: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidInputError) as caught:
        made()
    return [(each.field, each.message) for each in caught.value.violations]


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"loss": "mse"}, "loss", "is not allowed beside turns, each of which has its own"),
        ({"step": "a:b"}, "step", "is not allowed beside turns"),
        ({"optimizer": SGD}, "optimizer", "is not allowed beside turns"),
        ({"turns": TURNS[:1]}, "turns", "has 1 turns; 2 to 8 are allowed"),
        ({"turns": [TURNS[0], TURNS[0]]}, "turns[1].name", "is the name of an earlier turn"),
        (
            {"compression": "ternary", "strategy": data_parallel(2)},
            "compression",
            "is not allowed with turns",
        ),
        ({"data": {"entrypoint": "a:b", "streams": 2}}, "turns", "which a stream"),
        ({"phases": {}}, "phases", "is not allowed with turns"),
        ({"callbacks": "a:b"}, "callbacks", "are not allowed with turns"),
        (
            {"turns": [{**TURNS[0], "optimizer": {**SGD, "schedule": PLATEAU}}, TURNS[1]]},
            "turns[0].optimizer.schedule",
            "plateau is not allowed in turns",
        ),
        (
            {"turns": [TURNS[0], {**TURNS[1], "optimizer": {**SGD, "schedule": "a:b"}}]},
            "turns[1].optimizer.schedule",
            "a schedule by entry point is not allowed in turns",
        ),
        (
            {"strategy": model_parallel({"gen": "a", "disc": "b"})},
            "turns",
            "are not allowed with strategy ModelParallel",
        ),
        (
            {"strategy": silos(data_parallel(2, "ParameterServer"))},
            "turns",
            "are not allowed with strategy DataParallel/ParameterServer",
        ),
        ({"evaluation": {"metrics": ["mae"]}}, "evaluation.metrics[0]", "'mae' needs predict"),
        (
            {"strategy": data_parallel(2, "ParameterServer")},
            "turns",
            "are not allowed with strategy DataParallel",
        ),
    ],
)
def test_what_does_not_go_with_turns_is_refused(
    changes: dict[str, Any], field: str, words: str
) -> None:
    refused = _refusal(lambda: JobSpec.parse(document(**gan(**changes))))
    assert field in dict(refused)
    assert words in dict(refused)[field]


def test_turns_go_with_an_early_stop() -> None:
    stop = {"metric": "loss", "mode": "min", "patience": 2}
    spec = job(**gan(evaluation={"split": "test", "every": "2 steps", "stop": stop}))
    assert spec.evaluation is not None
    assert spec.evaluation.stop is not None


def test_each_trained_parameter_is_in_one_turn() -> None:
    def build(*params: str) -> Trainer:
        turns = [{**turn, "params": each} for turn, each in zip(TURNS, params, strict=True)]
        return trainer_of(job(**gan(turns=turns)))

    assert (
        "parameter 'gen.0.weight' is in no turn"
        in _refusal(lambda: build("disc.*", "gen.1*"))[0][1]
    )
    assert "is in 'd' and 'g'" in _refusal(lambda: build("*", "gen.*"))[0][1]
    assert _refusal(lambda: build("*", "nothing"))[0] == (
        "turns[1].params",
        "'nothing' fits no trained parameter",
    )
    assert torch.is_grad_enabled()
