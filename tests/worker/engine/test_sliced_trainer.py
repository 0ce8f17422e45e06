"""Members that each step a slice of all parameters against one trainer that steps all of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.worker.engine import StepReport, build_sliced_trainer
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.exchange.all_reduce import all_reduce_schedule
from tests.jobs import job, user_data, user_model
from tests.worker.engine.sliced_party import links_over, replicated, sliced_party
from tests.worker.engine.support import ALLOWED, CPU, in_buckets, trainer_of

WIDE = user_model("mlp", hidden=12_007)
"""The first layer has 3 blocks of the norm, and no parameter ends with one."""
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5}
GROUPS = {
    "name": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "schedule": "tests.userland.schedules:sequential",
    "groups": [{"name": "vectors", "match": ["*bias*"], "optimizer": {"name": "adam", "lr": 0.01}}],
}
NUM_SHARDS = 4


def spec_of(model: Any = WIDE, **sections: Any) -> JobSpec:
    strategy = {
        "type": "DataParallel",
        "num_replicas": NUM_SHARDS,
        "aggregation": {"method": "AllReduce"},
        "options": {"partition_state": "optimizer"},
    }
    # 55 rows: the last batch of an epoch has 7, fewer than two for each shard.
    data = user_data("classes", num_rows=55)
    return job(model, **{"optimizer": ADAMW, "data": data, "strategy": strategy, **sections})


def told(report: StepReport) -> tuple[object, ...]:
    """What all members say alike of a step."""
    return (
        report.step,
        report.loss,
        report.weight,
        report.grad_norm,
        report.num_skipped,
        dict(report.learning_rates),
    )


# Members are threads here: a model that draws random numbers would draw them from one generator.
def assert_same_training(spec: JobSpec, engine: str, size: int, num_steps: int) -> None:
    whole = trainer_of(spec)
    exchange = in_buckets(whole, NUM_SHARDS)
    with links_over(engine, size) as links, sliced_party(spec, links, NUM_SHARDS) as party:
        for _ in range(num_steps):
            expected = told(whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS))
            assert [told(report) for report in party.step()] == [expected] * size
        assert party.digest() == replicated(whole)
        assert len({trainer.fingerprint() for trainer in party.trainers}) == 1
    exchange.close()


@pytest.mark.parametrize(
    ("engine", "size"), [("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4), ("grpc", 3)]
)
def test_any_number_of_members_has_the_bits_of_one(engine: str, size: int) -> None:
    assert_same_training(spec_of(), engine, size, 5)


def test_large_buckets_go_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce_schedule, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(all_reduce_schedule, "SMALL_BYTES", 0)
    assert_same_training(spec_of(), "grpc", 2, 3)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"optimizer": GROUPS}, id="groups, a schedule of the user's"),
        pytest.param({"weight_average": {"decay": 0.9}}, id="an average"),
        pytest.param(
            {"accumulation": {"micro_batch_size": 3, "normalize": "sum"}}, id="sums, not means"
        ),
        pytest.param(
            {"execution": {"precision": "Mixed", "amp_dtype": "float16"}},
            id="scaled loss",
        ),
        pytest.param({"execution": {"precision": "Half"}}, id="parameters of 16 bits"),
        pytest.param({"execution": {"precision": "Full"}}, id="parameters of 64 bits"),
        pytest.param(
            {"optimizer": {"name": "adagrad", "lr": 0.1, "initial_accumulator_value": 0.5}},
            id="a state from the start",
        ),
    ],
)
def test_settings_have_the_bits_of_one_member(sections: dict[str, Any]) -> None:
    spec = spec_of(**{"model": WIDE, **sections})
    assert_same_training(spec, "shm", 3, 4)


def test_a_step_whose_gradient_is_not_finite_is_skipped_by_all() -> None:
    spec = spec_of(accumulation={"non_finite": "skip_step"})
    with links_over("shm", 3) as links, sliced_party(spec, links, NUM_SHARDS) as party:
        party.step()
        before, first = party.digest(), party.trainers[0].model.get_parameter("0.weight")

        def spoil(grad: Tensor) -> Tensor:
            return torch.where(torch.arange(grad.numel()).view(grad.shape) == 99, torch.inf, grad)

        hook = first.register_hook(spoil)  # on one of the members
        assert [report.num_skipped for report in party.step()] == [1, 1, 1]
        hook.remove()
        assert party.digest() != before  # it is a step, of which nothing else has changed
        for trainer in party.trainers:
            trainer.step -= 1
        assert party.digest() == before
        assert [report.num_skipped for report in party.step()] == [0, 0, 0]


def test_a_state_goes_on_among_another_number_of_members() -> None:
    spec, whole = spec_of(), trainer_of(spec_of())
    exchange = in_buckets(whole, NUM_SHARDS)
    for _ in range(2):
        whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS)
    for size in (3, 1, 2):
        tensors, metadata = whole.copy_state()
        with links_over("shm", size) as links, sliced_party(spec, links, NUM_SHARDS) as party:
            for trainer in party.trainers:
                trainer.load_state(tensors, metadata)
            assert party.digest() == replicated(whole)
            whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS)
            party.step()
            assert party.digest() == replicated(whole)
    exchange.close()


def test_each_member_holds_about_its_share_of_the_moments() -> None:
    spec = spec_of(user_model("mlp", hidden=60_000))
    held = []
    for rank in range(3):
        trainer = build_sliced_trainer(spec, ALLOWED, StateShare(rank, 3), device=CPU, fresh=True)
        assert trainer.pieces is not None
        assert trainer.is_sole_copy
        held.append(sum(piece.numel() for piece in trainer.pieces.tensors))
    total = sum(param.numel() for _, param in trainer.params)
    assert sum(held) == total
    assert max(held) <= total / 3 + 2 * 65_536


@pytest.mark.parametrize("engine", ["shm", "grpc"])
def test_a_member_that_leaves_before_parameters_are_shared_fails_the_step(engine: str) -> None:
    spec = spec_of()
    with links_over(engine, 2) as links, sliced_party(spec, links, NUM_SHARDS) as party:
        party.step()
        pieces = party.trainers[1].pieces
        assert pieces is not None

        def leave(*_: object) -> None:
            party.exchanges[1].cut()
            raise ExchangeError("gone")

        object.__setattr__(pieces, "share", leave)

        def step(rank: int) -> str:
            shards = range(2 * rank, 2 * rank + 2)
            try:
                party.trainers[rank].train_step(party.exchanges[rank], shards, NUM_SHARDS)
            except ExchangeError as error:
                return str(error)
            return ""

        assert all(party.all(step))
