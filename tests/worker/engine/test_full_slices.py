"""Members that each keep a slice of the parameters, too, against one trainer that keeps all."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, StratagemError, UserCodeError
from stratagem.common.job.optimizer.partition_rules import BY_ELEMENT
from stratagem.worker.engine import EvaluationPart, EvaluationShare, build_sliced_trainer
from stratagem.worker.engine.trainers import synchronous_trainer
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.exchange.all_reduce import all_reduce_schedule
from tests.jobs import user_data, user_model
from tests.worker.engine.sliced_party import links_over, replicated, sliced_party
from tests.worker.engine.sliced_training import (
    NUM_SHARDS,
    WIDE,
    assert_same_training,
    sliced_job,
)
from tests.worker.engine.support import ALLOWED, CPU, evaluated, in_buckets, trainer_of

TOKENS = {"data": user_data("tokens"), "loss": "token_cross_entropy"}


spec_of = partial(sliced_job, "full")


@pytest.fixture(params=[None, 100_000], ids=["one bucket", "small buckets"])
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of which several take turns in a window, too."""
    if request.param is not None:
        monkeypatch.setattr(synchronous_trainer, "LENT_BUCKET_BYTES", request.param)
        monkeypatch.setattr(all_reduce_schedule, "PIECE_BYTES", request.param)


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize(
    ("engine", "size"),
    [("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4), ("grpc", 2), ("grpc", 3), ("grpc", 4)],
)
def test_any_number_of_members_has_the_bits_of_one(engine: str, size: int) -> None:
    assert_same_training(spec_of(), engine, size, 5)


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize(
    ("engine", "size"),
    [("shm", 2), ("shm", 3), ("shm", 4), ("grpc", 2), ("grpc", 3), ("grpc", 4)],
)
def test_mirrors_hold_what_their_neighbours_have(engine: str, size: int) -> None:
    assert_same_training(spec_of(), engine, size, 4, is_mirrored=True)


def test_many_buckets_go_through_few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronous_trainer, "LENT_BUCKET_BYTES", 1)
    for engine in ("shm", "grpc"):
        assert_same_training(spec_of("heavy"), engine, 3, 3)
        assert_same_training(spec_of("heavy"), engine, 3, 3, is_mirrored=True)


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        *(pytest.param(each, marks=pytest.mark.sweep) for each in BY_ELEMENT if each != "adamw"),
    ],
)
def test_two_hundred_steps_of_each_optimizer(name: str) -> None:
    """Scalar code for the last elements was seen to agree for 8 steps and to differ after 16."""
    model = user_model("mlp", hidden=5_471)
    spec = spec_of(model, optimizer={"name": name, "lr": 0.01})
    assert_same_training(spec, "shm", 3, 200)
    assert_same_training(spec, "shm", 3, 200, is_mirrored=True)


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        pytest.param(WIDE, {"data": user_data("classes", num_rows=50)}, id="members without rows"),
        pytest.param("tied", TOKENS, id="a weight of two layers"),
        pytest.param("shared_block", {}, id="a layer that is called twice"),
        pytest.param(user_model("shaped", is_tied=True, has_buffer=True), {}, id="tied layers"),
        pytest.param(user_model("recurrent", kind="LSTM"), {}, id="lstm"),
        pytest.param(user_model("recurrent", kind="GRUCell"), {}, id="a cell in a loop"),
        pytest.param("frozen_start", {}, id="a frozen layer"),
        pytest.param(user_model("slices:hollow"), {}, id="a parameter without elements"),
        pytest.param(
            "batch_norm_mlp", {"data": user_data("classes", num_rows=48)}, id="batch norm"
        ),
        pytest.param(
            "two_norms", {"data": user_data("classes", num_rows=48)}, id="buffers of two widths"
        ),
        pytest.param("token_model", TOKENS, id="embedding"),
        pytest.param("structured", {}, id="blocks that answer mappings"),
        pytest.param("heavy", {}, id="ten layers"),
        pytest.param("heavy", {"execution": {"gradient": {"Checkpointed": 2}}}, id="checkpointed"),
        pytest.param("tied", {**TOKENS, "accumulation": {"steps": 2}}, id="tied, accumulated"),
        pytest.param(
            WIDE,
            {"step": "tests.userland.steps:plain", "loss": None},
            id="a step function",
        ),
    ],
)
def test_models_have_the_bits_of_one_member(model: Any, sections: dict[str, Any]) -> None:
    for engine in ("shm", "grpc"):
        assert_same_training(spec_of(model, **sections), engine, 3, 4)
    assert_same_training(spec_of(model, **sections), "shm", 4, 3, is_mirrored=True)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {
                "optimizer": {
                    "name": "sgd",
                    "lr": 0.1,
                    "momentum": 0.9,
                    "schedule": "tests.userland.schedules:sequential",
                    "groups": [
                        {
                            "name": "vectors",
                            "match": ["*bias*"],
                            "optimizer": {"name": "adam", "lr": 0.01},
                        }
                    ],
                }
            },
            id="groups, a schedule of the user's",
        ),
        pytest.param(
            {"accumulation": {"micro_batch_size": 3, "normalize": "sum"}}, id="sums, not means"
        ),
        pytest.param(
            {"execution": {"precision": "Mixed", "amp_dtype": "float16"}}, id="scaled loss"
        ),
        pytest.param({"execution": {"precision": "Mixed"}}, id="products of 16 bits"),
        pytest.param({"execution": {"precision": "Full"}}, id="parameters of 64 bits"),
        pytest.param({"execution": {"memory": "MinimalPeak"}}, id="gradients are freed"),
        pytest.param(
            {"optimizer": {"name": "adagrad", "lr": 0.1, "initial_accumulator_value": 0.5}},
            id="a state from the start",
        ),
    ],
)
def test_settings_have_the_bits_of_one_member(sections: dict[str, Any]) -> None:
    for engine, size, is_mirrored in (("shm", 3, False), ("grpc", 2, False), ("shm", 3, True)):
        spec = spec_of(**{"model": WIDE, **sections})
        assert_same_training(spec, engine, size, 4, is_mirrored=is_mirrored)


def test_a_step_whose_gradient_is_not_finite_is_skipped_by_all() -> None:
    spec = spec_of(accumulation={"non_finite": "skip_step"})
    with (
        links_over("shm", 3) as links,
        sliced_party(spec, links, NUM_SHARDS, is_full=True) as party,
    ):
        party.step()
        before, (_, first) = party.digest(), party.trainers[0].params[0]

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


@pytest.mark.parametrize("engine", ["shm", "grpc"])
def test_a_state_goes_on_among_another_number_of_members(engine: str) -> None:
    spec, whole = spec_of(), trainer_of(spec_of())
    exchange = in_buckets(whole, NUM_SHARDS)
    for _ in range(2):
        whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS)
    for size in (3, 1, 2):
        tensors, metadata = whole.copy_state()
        with (
            links_over(engine, size) as links,
            sliced_party(spec, links, NUM_SHARDS, is_full=True) as party,
        ):
            for trainer in party.trainers:
                trainer.load_state(tensors, metadata)
            assert party.digest() == replicated(whole)
            whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS)
            party.step()
            assert party.digest() == replicated(whole)
    exchange.close()


@pytest.mark.parametrize(("engine", "size"), [("shm", 1), ("shm", 3), ("grpc", 3)])
def test_evaluations_gather_as_training_does(engine: str, size: int) -> None:
    """Seven batches, so that members have different numbers of them."""
    data = user_data("classes", num_rows=55, num_test_rows=26)
    evaluation = {"split": "test", "metrics": ["accuracy"], "batch_size": 4}
    spec = spec_of(data=data, evaluation=evaluation)
    whole = trainer_of(spec)
    exchange = in_buckets(whole, NUM_SHARDS)
    with (
        links_over(engine, size) as links,
        sliced_party(spec, links, NUM_SHARDS, is_full=True) as party,
    ):
        for _ in range(2):
            whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS)
            party.step()

            def evaluate(rank: int) -> list[EvaluationPart]:
                share = EvaluationShare(["test"], rank, size, lambda *_: None, {})
                return party.trainers[rank].evaluate(share)

            found = sorted((part.batch, part) for parts in party.all(evaluate) for part in parts)
            assert [part for _, part in found] == evaluated(whole)
    exchange.close()


@pytest.mark.parametrize("engine", ["shm", "grpc"])
def test_a_member_that_leaves_inside_of_a_pass_fails_the_step_of_all(engine: str) -> None:
    spec = spec_of("heavy")
    with (
        links_over(engine, 2) as links,
        sliced_party(spec, links, NUM_SHARDS, is_full=True) as party,
    ):
        party.step()
        layer = next(m for m in party.trainers[1].model.modules() if isinstance(m, nn.Tanh))
        layer.register_forward_hook(lambda *_: party.exchanges[1].cut())

        def step(rank: int) -> str:
            shards = range(2 * rank, 2 * rank + 2)
            try:
                party.trainers[rank].train_step(party.exchanges[rank], shards, NUM_SHARDS)
            except StratagemError as error:
                return str(error)
            return ""

        assert all(party.all(step))


def test_each_member_holds_its_share_of_the_parameters() -> None:
    spec = spec_of(user_model("mlp", hidden=60_000))
    held = []
    for rank in range(3):
        share = StateShare(rank, 3, is_full=True)
        trainer = build_sliced_trainer(spec, ALLOWED, share, device=CPU, fresh=True)
        assert trainer.pieces is not None
        assert trainer.is_sole_copy
        with torch._C.DisableTorchFunctionSubclass():
            left = [param.untyped_storage().nbytes() for _, param in trainer.params]
        assert left == [4] * 4  # a number that is none, in the place of all
        held.append(sum(piece.numel() for piece in trainer.pieces.tensors))
    total = sum(param.numel() for _, param in trainer.params)
    assert sum(held) == total
    assert max(held) <= total / 3 + 2 * 65_536


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("reads_elsewhere", "full, but the model reads 1.weight outside of the forward pass"),
        ("writes_itself", "full, but a forward pass of Clamped has changed its parameters in"),
        ("writes_outside", "full, but a forward pass of the model has changed its parameters in"),
        (
            "shares_with_what_is_frozen",
            "full needs parameters with storage of their own; 3.weight and 1.weight share one",
        ),
    ],
)
def test_what_cannot_be_gathered_is_refused_with_a_sentence(model: str, expected: str) -> None:
    spec = spec_of(user_model(f"slices:{model}"))
    with (
        pytest.raises(InvalidInputError, match=expected),
        sliced_party(spec, [None], NUM_SHARDS, is_full=True) as party,
    ):
        party.step()


def test_a_backward_pass_inside_a_forward_pass_is_refused_where_memory_is_given_back() -> None:
    spec = spec_of(user_model("odd_models:BackwardInside"))
    with (
        pytest.raises(UserCodeError, match="a micro-batch is one backward"),
        sliced_party(spec, [None], NUM_SHARDS, is_full=True) as party,
    ):
        party.step()
