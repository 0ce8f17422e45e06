"""Averages of the parameters: torch's numbers, after applied steps, in states and evaluations."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, WeightAverageSpec
from stratagem.worker.engine.optimizers import WeightAverage
from stratagem.worker.objectives.evaluator import EvaluationShare
from tests.jobs import job, user_data, user_model
from tests.reference.loops import sharded_loop
from tests.worker.engine.support import ALLOWED, assert_same_bits, train, trainer_of

EMA = {"kind": "ema", "decay": 0.75}
SWA = {"kind": "swa", "start_step": 3, "every": 2}
EVEN = user_data("classes", num_rows=48)
TEST = {"evaluation": {"split": "test", "every": "2 steps", "of": "average"}}


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_it_has_the_bits_of_torch(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    mean = get_ema_multi_avg_fn(0.999) if kind == "ema" else get_swa_multi_avg_fn()
    theirs = AveragedModel(model, multi_avg_fn=mean)
    ours = WeightAverage(
        WeightAverageSpec.model_validate({"kind": kind}), [*model.named_parameters()]
    )
    for step in range(1, 20):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param))
        ours.update(step)
        theirs.update_parameters(model)
    with ours.in_place():
        assert_same_bits(model.state_dict(), theirs.module.state_dict())


def parts(average: Any) -> JobSpec:
    return job(user_model("batch_norm_mlp"), data=EVEN, weight_average=average, **TEST)


@pytest.mark.parametrize("average", [EMA, SWA])
def test_it_is_that_of_the_reference_and_goes_with_the_state(average: Any) -> None:
    spec = parts(average)
    expected = sharded_loop(spec, ALLOWED, 3)
    trainer = trainer_of(spec)
    train(trainer, 3, 4)
    again = trainer_of(spec, fresh=False)
    again.load_state(*trainer.copy_state())
    train(again, 3, 6)
    tensors, metadata = again.copy_state()
    assert metadata["average/num_averaged"] == ("10" if average is EMA else "4")
    means = {name: t for name, t in tensors.items() if name.startswith("average/")}
    params = dict(again.params)
    assert_same_bits(means, {f"average/{name}": expected.average[name] for name in params})
    live = {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}
    assert_same_bits(live, dict(expected.state))
    before = again.fingerprint()
    share = EvaluationShare(["test"], 0, 1, lambda *_: None, {})
    (part,) = again.evaluate(share)
    assert again.fingerprint() == before
    again.model.load_state_dict(expected.average)
    assert part == again.evaluator().part("test", 0)


def test_a_step_that_is_left_out_is_not_averaged() -> None:
    told = user_model("acting_models:Told", at=7, what="nan")
    skipping = {"steps": 4, "non_finite": "skip_step"}
    spec = job(told, data=EVEN, weight_average={"kind": "swa"}, accumulation=skipping)
    trainer = trainer_of(spec)
    train(trainer, 1, 4)
    assert trainer.copy_state()[1]["average/num_averaged"] == "3"
    expected = sharded_loop(spec, ALLOWED, 1, num_steps=4)
    means = {f"average/{name}": expected.average[name] for name, _ in trainer.params}
    assert_same_bits({n: t for n, t in trainer.copy_state()[0].items() if n in means}, means)


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"weight_average": {"kind": "swa", "decay": 0.9}}, "weight_average.decay"),
        (
            {"evaluation": {"of": "average"}},
            "evaluation.of: there is no average without weight_average",
        ),
        (
            {
                "weight_average": EMA,
                "strategy": {
                    "type": "DataParallel",
                    "num_replicas": 2,
                    "aggregation": {"method": "Decentralized", "topology": "ring"},
                },
            },
            "weight_average: cannot go with strategy.aggregation.method Decentralized",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(sections: Any, what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        job(**sections)
