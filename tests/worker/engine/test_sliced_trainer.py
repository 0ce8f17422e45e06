"""Members that each keep a slice of the state, or of the parameters too, against one trainer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, StratagemError, UserCodeError
from stratagem.common.tensors.same_bytes import parameter_slice, slice_name
from stratagem.worker.engine import EvaluationPart, EvaluationShare, build_trainer
from stratagem.worker.engine import trainer as synchronous_trainer
from stratagem.worker.engine.slices import StateShare
from stratagem.worker.engine.state_format import dealt_out
from stratagem.worker.exchange import ExchangeError, all_reduce
from tests.every_pair import every_pair, every_value
from tests.jobs import user_data, user_model
from tests.worker.engine.sliced_party import (
    SlicedParty,
    links_over,
    replicated,
    sliced_party,
    step_without_norms,
    told,
)
from tests.worker.engine.sliced_training import (
    NUM_SHARDS,
    WIDE,
    assert_same_slices,
    assert_same_training,
    sliced_job,
)
from tests.worker.engine.support import ALLOWED, CPU, evaluated, in_buckets, trainer_of

STATES = ["optimizer", "full"]
ANY_STATE = pytest.mark.parametrize("state", STATES)
EVEN = {"data": user_data("classes", num_rows=48)}
TOKENS = {"data": user_data("tokens"), "loss": "token_cross_entropy"}
GROUPS = {
    "name": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "schedule": "tests.userland.schedules:sequential",
    "groups": [{"name": "vectors", "match": ["*bias*"], "optimizer": {"name": "adam", "lr": 0.01}}],
}


@pytest.mark.parametrize(
    ("state", "layout", "is_mirrored", "bucket_bytes"),
    every_pair(
        STATES,
        [("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4), ("grpc", 2), ("grpc", 3)],
        [False, True],
        [None, 100_000],
    ),
)
def test_any_number_of_members_has_the_bits_of_one(
    state: str,
    layout: tuple[str, int],
    is_mirrored: bool,
    bucket_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buckets of which several take turns in a window, and go in pieces, too."""
    if bucket_bytes is not None:
        monkeypatch.setattr(synchronous_trainer, "LENT_BUCKET_BYTES", bucket_bytes)
        monkeypatch.setattr(all_reduce, "PIECE_BYTES", bucket_bytes)
        monkeypatch.setattr(all_reduce, "SMALL_BYTES", 0)
    engine, size = layout
    is_mirrored = is_mirrored and size > 1
    assert_same_training(sliced_job(state), engine, size, 3, is_mirrored=is_mirrored)


@pytest.mark.parametrize(("engine", "model", "size"), [("shm", "tall", 3), ("grpc", "heavy", 2)])
def test_many_buckets_go_through_few_windows(
    engine: str, model: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronous_trainer, "LENT_BUCKET_BYTES", 1)
    spec = sliced_job("full", model)
    assert_same_training(spec, engine, size, 2, is_mirrored=engine == "shm")


@pytest.mark.parametrize(("name", "state"), [("adamw", "full"), ("rmsprop", "optimizer")])
def test_many_steps_of_each_optimizer(name: str, state: str) -> None:
    """Scalar code for the last elements was seen to agree for 8 steps and to differ after 16."""
    model, optimizer = user_model("mlp", hidden=5_471), {"name": name, "lr": 0.01}
    spec = sliced_job(state, model, optimizer=optimizer)
    assert_same_training(spec, "shm", 3, 24, is_mirrored=True)


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "members without rows": (WIDE, {"data": user_data("classes", num_rows=18)}),
    "a weight of two layers": ("tied", TOKENS),
    "tied layers": (user_model("shaped", is_tied=True, has_buffer=True), {}),
    "a frozen layer": ("frozen_start", {}),
    "a parameter without elements": (user_model("slices:hollow"), {}),
    "buffers of two widths": ("two_norms", EVEN),
}
OF_FULL: dict[str, tuple[Any, dict[str, Any]]] = {
    **MODELS,
    "a layer that is called twice": ("shared_block", {}),
    "lstm": (user_model("recurrent", kind="LSTM"), {}),
    "a cell in a loop": (user_model("recurrent", kind="GRUCell"), {}),
    "batch norm": ("batch_norm_mlp", EVEN),
    "embedding": ("token_model", TOKENS),
    "blocks that answer mappings": ("structured", {}),
    "ten layers": ("heavy", {}),
    "checkpointed": ("heavy", {"execution": {"gradient": {"Checkpointed": 2}}}),
    "tied, accumulated": ("tied", {**TOKENS, "accumulation": {"steps": 2}}),
    "a step function": (WIDE, {"step": "tests.userland.steps:plain", "loss": None}),
}
OF_OPTIMIZER: dict[str, tuple[Any, dict[str, Any]]] = {
    **MODELS,
    "memory of what is frozen": (user_model("slices:shares_with_what_is_frozen"), {}),
    "parameters of one storage": (user_model("slices:lies_in_one_storage"), {}),
    "an average": ("two_norms", {**EVEN, "weight_average": {"decay": 0.9}}),
}


@pytest.mark.parametrize(
    ("name", "layout"), every_value(list(OF_FULL), [("shm", 4), ("grpc", 3), ("shm", 3)])
)
def test_models_have_the_bits_of_one_member(name: str, layout: tuple[str, int]) -> None:
    model, sections = OF_FULL[name]
    spec = sliced_job("full", model, **sections)
    assert_same_training(spec, *layout, 3, is_mirrored=layout[0] == "shm")


@pytest.mark.parametrize(
    ("name", "size", "is_mirrored"),
    every_value(list(OF_OPTIMIZER), [2, 3], [True, True, False, False, True]),
)
def test_what_is_not_divided_is_dealt_out_without_a_trace(
    name: str, size: int, is_mirrored: bool
) -> None:
    model, sections = OF_OPTIMIZER[name]
    spec = sliced_job("optimizer", model, **sections)
    assert_same_training(spec, "shm", size, 3, is_mirrored=is_mirrored)


@pytest.mark.parametrize(
    ("state", "sections"),
    [
        *(
            pytest.param(state, sections, id=f"{state}, {name}")
            for name, sections in {
                "groups, a schedule of the user's, parameters of 64 bits": {
                    "optimizer": GROUPS,
                    "execution": {"precision": "Full"},
                },
                "sums, not means, products of 16 bits": {
                    "accumulation": {"micro_batch_size": 3, "normalize": "sum"},
                    "execution": {"precision": "Mixed"},
                },
                "scaled loss, gradients are freed": {
                    "execution": {
                        "precision": "Mixed",
                        "amp_dtype": "float16",
                        "memory": "MinimalPeak",
                    }
                },
                "a state from the start": {
                    "optimizer": {"name": "adagrad", "lr": 0.1, "initial_accumulator_value": 0.5}
                },
            }.items()
            for state in STATES
        ),
        ("optimizer", {"weight_average": {"decay": 0.9}}),
        ("optimizer", {"execution": {"precision": "Half"}}),
    ],
)
def test_settings_have_the_bits_of_one_member(state: str, sections: dict[str, Any]) -> None:
    spec = sliced_job(state, **sections)
    assert_same_training(spec, "shm", 3, 3, is_mirrored=True)


def test_each_member_copies_its_slices_alone() -> None:
    """A parameter and its two moments, and of a number for each parameter one copy."""
    with (
        links_over("shm", 3) as links,
        sliced_party(sliced_job("optimizer", "heavy"), links, NUM_SHARDS) as party,
    ):
        party.step()
        numbers = []
        for trainer in party.trainers:
            assert trainer.pieces is not None
            num_bytes = sum(tensor.nbytes for tensor in trainer.copy_state()[0].values())
            numbers.append(num_bytes - sum(3 * piece.nbytes for piece in trainer.pieces.tensors))
        assert min(numbers) >= 0
        assert sum(numbers) == 4 * len(party.trainers[0].params)


@pytest.mark.parametrize(
    ("sizes", "num_members", "first_bytes", "expected"),
    [
        ((), 2, 0, [set(), set()]),
        ((3,), 1, 0, [{"0"}]),
        ((1, 9, 4, 4), 2, 0, [{"1"}, {"0", "2", "3"}]),
        ((1, 9, 4, 4), 2, 40, [{"3"}, {"0", "1", "2"}]),
        ((5, 5, 5), 3, 0, [{"0"}, {"1"}, {"2"}]),
        ((0, 0), 2, 0, [{"0", "1"}, set()]),
    ],
)
def test_tensors_are_dealt_out_by_size(
    sizes: tuple[int, ...], num_members: int, first_bytes: int, expected: list[set[str]]
) -> None:
    tensors = {str(n): torch.zeros(size) for n, size in enumerate(sizes)}
    assert dealt_out(tensors, num_members, first_bytes) == expected
    one, two = torch.zeros(8), torch.zeros(8)
    assert dealt_out({"a": one, "b": two, "again": one}, 2, 0) == [{"a", "again"}, {"b"}]


@ANY_STATE
def test_a_step_whose_gradient_is_not_finite_is_skipped_by_all(state: str) -> None:
    spec = sliced_job(state, accumulation={"non_finite": "skip_step"})
    with (
        links_over("shm", 3) as links,
        sliced_party(spec, links, NUM_SHARDS, is_full=state == "full") as party,
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


@pytest.mark.parametrize(("state", "engine"), [("optimizer", "shm"), ("full", "grpc")])
def test_a_state_goes_on_among_another_number_of_members(state: str, engine: str) -> None:
    spec = sliced_job(state)
    whole = trainer_of(spec)
    exchange = in_buckets(whole, NUM_SHARDS)
    for _ in range(2):
        whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS)
    for size in (3, 1, 2):
        tensors, metadata = whole.copy_state()
        with (
            links_over(engine, size) as links,
            sliced_party(spec, links, NUM_SHARDS, is_full=state == "full") as party,
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
    spec = sliced_job("full", data=data, evaluation=evaluation)
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


def leave_in_a_pass(party: SlicedParty) -> None:
    layer = next(m for m in party.trainers[1].model.modules() if isinstance(m, nn.Tanh))
    layer.register_forward_hook(lambda *_: party.exchanges[1].cut())


def leave_before_sharing(party: SlicedParty) -> None:
    def leave(*_: object) -> None:
        party.exchanges[1].cut()
        raise ExchangeError("gone")

    object.__setattr__(party.trainers[1].pieces, "share", leave)


@pytest.mark.parametrize("engine", ["shm", "grpc"])
@pytest.mark.parametrize(
    ("state", "leave"), [("full", leave_in_a_pass), ("optimizer", leave_before_sharing)]
)
def test_a_member_that_leaves_fails_the_step_of_all(state: str, leave: Any, engine: str) -> None:
    with (
        links_over(engine, 2) as links,
        sliced_party(
            sliced_job(state, "heavy"), links, NUM_SHARDS, is_full=state == "full"
        ) as party,
    ):
        party.step()
        leave(party)

        def step(rank: int) -> str:
            shards = range(2 * rank, 2 * rank + 2)
            try:
                party.trainers[rank].train_step(party.exchanges[rank], shards, NUM_SHARDS)
            except StratagemError as error:
                return str(error)
            return ""

        assert all(party.all(step))


@ANY_STATE
def test_each_member_holds_about_its_share(state: str) -> None:
    spec, held = sliced_job(state, user_model("mlp", hidden=60_000)), []
    for rank in range(3):
        share = StateShare(rank, 3, is_full=state == "full")
        trainer = build_trainer(spec, ALLOWED, share, device=CPU, fresh=True)
        assert trainer.pieces is not None
        assert trainer.is_sole_copy
        if state == "full":
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
        ("slices:reads_elsewhere", "full, but the model reads 1.weight outside of the forward"),
        ("slices:writes_itself", "full, but a forward pass of Clamped has changed its parameters"),
        ("slices:writes_outside", "full, but a forward pass of the model has changed its param"),
        (
            "slices:shares_with_what_is_frozen",
            "full needs parameters with storage of their own; 3.weight and 1.weight share one",
        ),
        ("odd_models:BackwardInside", "a micro-batch is one backward"),
    ],
)
def test_what_cannot_be_gathered_is_refused_with_a_sentence(model: str, expected: str) -> None:
    error = UserCodeError if "Backward" in model else InvalidInputError
    with (
        pytest.raises(error, match=expected),
        sliced_party(
            sliced_job("full", user_model(model)), [None], NUM_SHARDS, is_full=True
        ) as party,
    ):
        party.step()


@ANY_STATE
def test_a_step_that_all_skip_leaves_nothing_out_where_it_is_finished_later(state: str) -> None:
    """Else its average would be taken after it, by those that have the state from this member."""
    spec = sliced_job(state, accumulation={"non_finite": "skip_step"})
    with (
        links_over("shm", 3) as links,
        sliced_party(spec, links, NUM_SHARDS, is_mirrored=True, is_full=state == "full") as party,
    ):
        party.step()
        first, second = party.trainers[0], party.trainers[1]
        for trainer in party.trainers:
            trainer.params[0][1].register_hook(lambda grad: torch.full_like(grad, torch.inf))
        step_without_norms(party, 1)
        assert first.pieces is not None
        assert first.pieces.summary is not None
        assert not first.pieces.summary.is_finite
        norm = first.pieces.summary.norm.item()
        report = second.finish_step_in_doubt(norm, is_finite=False)
        assert (report.step, report.num_skipped, report.is_torn) == (2, 1, False)
        assert second.pieces is not None
        assert not second.pieces.torn


@ANY_STATE
@pytest.mark.parametrize("engine", ["shm", "grpc"])
def test_a_step_that_others_have_applied_is_finished_later(engine: str, state: str) -> None:
    """One member does not hear the norms: the others have applied the step and miss its slice."""
    spec, whole = sliced_job(state), trainer_of(sliced_job(state))
    is_full = state == "full"
    exchange = in_buckets(whole, NUM_SHARDS)
    with (
        links_over(engine, 3) as links,
        sliced_party(spec, links, NUM_SHARDS, is_mirrored=True, is_full=is_full) as party,
    ):
        party.step()
        reports = step_without_norms(party, 1)
        # The third has a mirror of the slice that is missed, so it ends the step whole where all
        # that it sends is there before the cut.
        # With slices of parameters nothing is sent after an update over a link.
        is_torn = not (is_full and engine == "grpc")
        assert [report is None or report.is_torn for report in reports[:2]] == [is_torn, True]
        assert reports[1] is None
        first, late = party.trainers[0].pieces, party.trainers[1].pieces
        assert first is not None
        assert first.summary is not None
        assert late is not None
        assert late.in_doubt is not None
        assert (party.trainers[1].step, late.in_doubt.step) == (1, 2)
        norm, is_finite = first.summary.norm.item(), first.summary.is_finite
        finished = party.trainers[1].finish_step_in_doubt(norm, is_finite=is_finite)
        for _ in range(2):
            expected = told(whole.train_step(exchange, range(NUM_SHARDS), NUM_SHARDS))
        assert told(finished) == expected
        own: dict[str, Tensor] = {}
        for rank, trainer in enumerate(party.trainers):
            assert trainer.pieces is not None
            own |= trainer.pieces.slices(trainer.model, of_mirror=False)[0]
            assert_same_slices(party.trainers[rank - 1], trainer)
        tensors = whole.state()[0]
        for name, part in own.items():
            place = slice_name(name) or parameter_slice(name)
            assert place is not None
            flat = tensors[place.whole].reshape(-1)[place.first : place.first + part.numel()]
            assert torch.equal(part.reshape(-1), flat), name
    exchange.close()
