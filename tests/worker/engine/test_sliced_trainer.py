"""Members that each step a slice of all parameters against one trainer that steps all of them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.tensors.state_slices import parameter_slice, slice_name
from stratagem.worker.engine import build_sliced_trainer
from stratagem.worker.engine.trainers.dealt_tensors import dealt_out
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.exchange.all_reduce import all_reduce_schedule
from tests.jobs import user_data, user_model
from tests.worker.engine.sliced_party import (
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
from tests.worker.engine.support import ALLOWED, CPU, in_buckets, trainer_of

GROUPS = {
    "name": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "schedule": "tests.userland.schedules:sequential",
    "groups": [{"name": "vectors", "match": ["*bias*"], "optimizer": {"name": "adam", "lr": 0.01}}],
}
EVEN = {"data": user_data("classes", num_rows=48)}
TOKENS = {"data": user_data("tokens"), "loss": "token_cross_entropy"}

spec_of = partial(sliced_job, "optimizer")


@pytest.mark.parametrize(
    ("engine", "size"), [("shm", 2), ("shm", 3), ("shm", 4), ("grpc", 2), ("grpc", 3)]
)
def test_mirrors_hold_what_their_neighbours_have(engine: str, size: int) -> None:
    assert_same_training(spec_of(), engine, size, 4, is_mirrored=True)


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
    assert_same_training(spec, "shm", 3, 4, is_mirrored=True)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "sections"),
    [
        pytest.param("tied", TOKENS, id="a weight of two layers"),
        pytest.param("frozen_start", {}, id="a frozen layer"),
        pytest.param(user_model("shaped", is_tied=True, has_buffer=True), {}, id="tied layers"),
        pytest.param(
            user_model("slices:shares_with_what_is_frozen"),
            {},
            id="memory that is trained elsewhere",
        ),
        pytest.param(user_model("slices:lies_in_one_storage"), {}, id="parameters of one storage"),
        pytest.param(user_model("slices:hollow"), {}, id="a parameter without elements"),
        pytest.param("two_norms", EVEN, id="batch norms"),
        pytest.param("two_norms", {**EVEN, "weight_average": {"decay": 0.9}}, id="an average"),
    ],
)
def test_what_is_not_divided_is_dealt_out_without_a_trace(
    model: Any, sections: dict[str, Any], size: int
) -> None:
    spec = spec_of(model, **sections)
    assert_same_training(spec, "shm", size, 3, is_mirrored=size > 1)
    assert_same_training(spec, "shm", size, 3)


def test_each_member_copies_its_slices_alone() -> None:
    """A parameter and its two moments, and of a number for each parameter one copy."""
    for size in (2, 3, 4):
        spec = spec_of("heavy")
        with links_over("shm", size) as links, sliced_party(spec, links, NUM_SHARDS) as party:
            party.step()
            numbers = []
            for trainer in party.trainers:
                assert trainer.pieces is not None
                tensors, _ = trainer.copy_state()
                num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                numbers.append(
                    num_bytes - sum(3 * piece.nbytes for piece in trainer.pieces.tensors)
                )
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


def test_a_tensor_under_two_names_is_dealt_to_one_member() -> None:
    one, two = torch.zeros(8), torch.zeros(8)
    tensors = {"a": one, "b": two, "again": one}
    assert dealt_out(tensors, 2, 0) == [{"a", "again"}, {"b"}]


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


@pytest.mark.parametrize("state", ["optimizer", "full"])
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


@pytest.mark.parametrize("state", ["optimizer", "full"])
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
