"""States, evaluation, failures, the seam for replicas, and what cannot be cut."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import with_fields
from stratagem.common.numerics.rules import CURRENT, KEEPS_DTYPES
from stratagem.common.numerics.shards import Node, tree_sum
from stratagem.worker.engine import build_trainer
from stratagem.worker.exchange import GradientBuckets, StepScalars, solo_exchange
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.pipeline.agreement import StageExchange, StageGradients
from stratagem.worker.pipeline.build import StageAssignment, SumOverReplicas
from stratagem.worker.pipeline.messages import LocalPost, LocalTransport
from stratagem.worker.pipeline.rank_trainer import StageRunner
from tests.jobs import LOSSES, user_data, user_model
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop
from tests.userland.models import NUM_FEATURES
from tests.worker.engine.support import assert_same_bits, evaluated
from tests.worker.pipeline.graphs import BRANCHES
from tests.worker.pipeline.support import ADAM, ALLOWED, SGD, Party, cut, deep_job

CPU = torch.device("cpu")
DEEP = [str(i) for i in range(8)]
TWO = StageAssignment(cut(DEEP, 3, 5), (0, 1), 3)
TIED = deep_job(
    user_model("tied"), data=user_data("tokens"), loss="token_cross_entropy", optimizer=ADAM
)
AVERAGED = with_fields(TIED, {"weight_average.kind": "swa", "weight_average.start_step": 2})


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [(deep_job(optimizer=ADAM), (3, 5)), (deep_job(), (3, 5)), (AVERAGED, (2, 2))],
)
def test_resumes_on_another_split_and_in_a_single_process(spec: Any, sizes: Any) -> None:
    names = [str(i) for i in range(sum(sizes))]
    straight = Party(spec, StageAssignment(cut(names, *sizes), (0, 1), 3))
    straight.train(5)
    first = Party(spec, StageAssignment(cut(names, *sizes), (0, 1), 3))
    first.train(2)
    tensors, metadata = first.state()
    again = Party(
        spec, StageAssignment(cut(names, 1, *sizes[1:], sizes[0] - 1), (0, 1, 2), 3), fresh=False
    )
    for runner in again.runners:
        runner.load_state(tensors, metadata)
    again.train(3)
    assert_same_bits(again.state()[0], straight.state()[0])
    assert again.state()[1] == straight.state()[1]
    expected = sharded_loop(spec, ALLOWED, 1, 5, micro_batch_size=3).average
    means = [name for name in straight.state()[0] if name.startswith("average/")]
    assert len(means) == (3 if spec is AVERAGED else 0)
    assert all(
        straight.state()[0][name].equal(expected[name.removeprefix("average/")]) for name in means
    )
    alone = build_trainer(spec, ALLOWED, device=CPU, fresh=False)
    alone.load_state(tensors, metadata)
    assert alone.state()[0].keys() == tensors.keys()


@pytest.mark.parametrize(
    ("numerics", "dtype"), [(KEEPS_DTYPES - 1, torch.float32), (CURRENT, torch.bfloat16)]
)
def test_only_a_run_of_old_widens_what_its_model_says_in_16_bits(
    numerics: int, dtype: torch.dtype
) -> None:
    names = tuple(str(i) for i in range(5))
    spec = deep_job(user_model("in_dtypes", dtypes=["float32", "bfloat16"]))
    party = Party(spec, StageAssignment((names,), (0,), numerics=numerics))
    part = party.runners[0]._rank.parts[0]
    assert part.forward(torch.zeros(2, NUM_FEATURES), {})[0].output.dtype == dtype


def test_a_rank_holds_and_wants_its_own_nodes_only() -> None:
    party = Party(deep_job(), TWO)
    party.train(1)
    first, last = party.runners
    assert {name.split("/")[1].split(".")[0] for name in first.state()[0]} == {"0", "1"}
    assert first.wants("model/1.running_mean")
    assert first.wants("optimizer/0.weight/momentum_buffer")
    assert not first.wants("model/7.weight")
    assert not first.wants("optimizer/7.weight/momentum_buffer")
    assert sum(p.numel() for p in last.model.parameters()) == 16 * 16 + 16 + 32 + 16 * 5 + 5
    tied = Party(TIED, StageAssignment(cut(["0", "1", "2", "3"], 2, 2), (0, 1)))
    assert tied.runners[1].wants("optimizer/0.weight/exp_avg")
    assert [name for name, _ in tied.runners[1].params] == ["0.weight"]


def test_an_evaluation_is_that_of_a_single_process() -> None:
    evaluation = {"split": "train", "batch_size": 2, "metrics": ["accuracy"], "every": "1 epoch"}
    for ranks in ((0, 1, 2), (0, 1, 0)):
        spec = deep_job(evaluation=evaluation)
        party = Party(spec, StageAssignment(cut(DEEP, 3, 2, 3), ranks, 3))
        party.train(2)
        alone = build_trainer(spec, ALLOWED, device=CPU, fresh=False)
        alone.load_state(*party.state())
        expected = evaluated(alone, "train")
        found = party.each(lambda runner: [runner.evaluate_split("train") for _ in range(2)])
        last = ranks[2]
        assert found[last] == [expected, expected]
        assert all(not any(each) for rank, each in enumerate(found) if rank != last)
        assert party.train(1) == sharded_loop(spec, ALLOWED, 1, 3, micro_batch_size=3).losses[2:]
        with pytest.raises(InvalidInputError, match='no split "tset"'):
            party.each(lambda runner: runner.evaluate_split("tset"))


class Replicas:
    """Adds up over the replicas of each rank, as a mesh per stage would."""

    def __init__(self, num_replicas: int) -> None:
        self._given: dict[int, StageGradients | None] = {}
        self._barrier = threading.Barrier(num_replicas)

    def reduce(self, replica: int, mine: StageGradients | None) -> StageGradients:
        self._given[replica] = mine
        self._barrier.wait(PATIENCE_S)
        live = [each for _, each in sorted(self._given.items()) if each is not None]

        def total(tensors: list[torch.Tensor]) -> torch.Tensor:
            leaves = {Node(i, i + 1): tensor.clone() for i, tensor in enumerate(tensors)}
            return tree_sum(leaves, len(tensors), torch.add)

        names = live[0].gradients
        answer = StageGradients(
            {name: total([each.gradients[name] for each in live]) for name in names},
            StepScalars.of(total([each.scalars.flat() for each in live]), len(names)),
        )
        self._barrier.wait(PATIENCE_S)
        return answer


NO_DROPOUT = user_model("deep", dropout=0.0)


@pytest.mark.parametrize(
    ("spec", "sizes", "micro_batch_size"),
    [
        (deep_job(NO_DROPOUT, optimizer=ADAM, batch_size=10), (5, 3), None),
        (TIED, (2, 2), 2),
        (TIED.model_copy(update={"batch_size": 2}), (3, 1), 1),  # a replica without rows
    ],
    ids=["uneven", "tied", "without rows"],
)
def test_data_parallel_over_pipelines_equals_the_sharded_loop(
    spec: Any, sizes: tuple[int, ...], micro_batch_size: int | None
) -> None:
    """Three replicas of two stages; no dropout, for these replicas compute at the same time."""
    names = [str(i) for i in range(sum(sizes))]
    placement = StageAssignment(cut(names, *sizes), (0, 1), micro_batch_size)
    parties = [Party(spec, placement) for _ in range(3)]
    sums = [Replicas(3), Replicas(3)]
    losses: dict[int, list[list[float]]] = {}

    def steps(replica: int, runner: StageRunner) -> list[float]:
        rank = parties[replica].runners.index(runner)

        def add_up(_: int, mine: Iterator[StageGradients]) -> StageGradients:
            return sums[rank].reduce(replica, next(mine, None))

        exchange = StageExchange(LocalTransport(LocalPost(1), 0), reduce=add_up)
        return [runner.train_step(exchange, range(replica, replica + 1), 3).loss for _ in range(2)]

    def run(replica: int) -> None:
        losses[replica] = parties[replica].each(lambda runner: steps(replica, runner))

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sharded_loop(spec, ALLOWED, 3, 2, micro_batch_size=micro_batch_size)
    assert losses == dict.fromkeys(range(3), [expected.losses] * 2)
    for party in parties:
        assert_same_bits(party.model(), dict(expected.state))


@pytest.mark.parametrize(
    ("spec", "sizes", "micro_batch_size", "num_shards"),
    [
        (deep_job(optimizer=ADAM), (3, 5), None, 2),
        (TIED, (2, 2), 2, 3),
        (TIED, (3, 1), 1, 7),
    ],
    ids=["halves", "tied", "without rows"],
)
def test_one_pipeline_may_compute_all_shards(
    spec: Any, sizes: tuple[int, ...], micro_batch_size: int | None, num_shards: int
) -> None:
    """The last of three batches has 6 rows, fewer than shards in one case."""
    names = [str(i) for i in range(sum(sizes))]
    party = Party(spec, StageAssignment(cut(names, *sizes), (0, 1), micro_batch_size))
    sums = [
        SumOverReplicas(
            runner,
            solo_exchange(GradientBuckets(runner.params, num_extras=runner.num_extras), num_shards),
        )
        for runner in party.runners
    ]

    def steps(runner: StageRunner) -> list[float]:
        reduce = sums[party.runners.index(runner)]
        exchange = StageExchange(LocalTransport(LocalPost(1), 0), reduce=reduce)
        return [runner.train_step(exchange, range(num_shards), num_shards).loss for _ in range(4)]

    expected = sharded_loop(
        spec, ALLOWED, num_shards, 4, micro_batch_size=micro_batch_size or 2**62
    )
    assert party.each(steps) == [expected.losses] * 2
    assert_same_bits(party.model(), dict(expected.state))


def test_an_error_of_the_user_ends_the_step_everywhere_and_changes_nothing() -> None:
    party = Party(deep_job(loss="tests.userland.losses:broken_loss"), TWO)
    before = [runner.fingerprint() for runner in party.runners]
    found: list[BaseException | None] = [None, None]

    def step(runner: StageRunner) -> None:
        try:
            runner.train_step()
        except (UserCodeError, ExchangeError) as error:
            found[party.runners.index(runner)] = error

    party.each(step)
    assert isinstance(found[0], ExchangeError)
    assert isinstance(found[1], UserCodeError)
    given = "; the loss was called with (float32[3, 5], int64[3])"
    assert found[1].message == f"labels are upside down{given}"
    assert found[1].activity == "training step 1"
    assert [runner.fingerprint() for runner in party.runners] == before


@pytest.mark.parametrize(
    ("loss", "what"), [("infinite_loss", "non-finite loss at step 1"), ("steep", "gradient")]
)
def test_what_is_not_finite_is_refused_by_all_ranks_alike(loss: str, what: str) -> None:
    party = Party(deep_job(loss=f"{LOSSES}:{loss}"), TWO)
    before = [runner.fingerprint() for runner in party.runners]

    def step(runner: StageRunner) -> str:
        with pytest.raises(UserCodeError, match=what) as caught:
            runner.train_step()
        return str(caught.value)

    for _ in range(2):  # the party is still whole
        assert len(set(party.each(step))) == 1
    assert [runner.fingerprint() for runner in party.runners] == before


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks_alike() -> None:
    """The third batch of an epoch has 6 rows, for which the loss is infinite."""
    loss, skip = "tests.userland.losses:infinite_if_short", {"non_finite": "skip_step"}
    two = StageAssignment(cut(DEEP, 3, 5), (0, 1))
    party = Party(deep_job(loss=loss, accumulation=skip), two)
    party.train(2)
    before = party.model()
    reports = party.each(lambda runner: runner.train_step())
    assert [(each.step, each.num_skipped, each.weight) for each in reports] == [(3, 1, 0.0)] * 2
    assert_same_bits(party.model(), before)
    reports = party.each(lambda runner: runner.train_step())
    assert [(each.step, each.num_skipped, each.weight) for each in reports] == [(4, 0, 8.0)] * 2
    assert any(not torch.equal(party.model()[name], before[name]) for name in before)


def test_a_wish_to_stop_and_the_rates_of_all_groups_reach_all() -> None:
    """The second rank holds no parameter of the group `first`."""
    first = {"name": "first", "match": ["0.*"], "lr": 0.5}
    spec = deep_job(optimizer={"name": "sgd", "lr": 0.25, "groups": [first]})
    party = Party(spec, TWO)
    reports = party.each(lambda r: r.train_step(stop=r is party.runners[0]))
    assert [(each.step, each.stop, each.weight) for each in reports] == [(1, True, 8.0)] * 2
    rates = {"train.lr.default": 0.25, "train.lr.first": 0.5}
    assert [each.learning_rates for each in reports] == [rates] * 2
    assert not any(each.stop for each in party.each(lambda r: r.train_step()))


@pytest.mark.parametrize(
    ("model", "partitions", "reason"),
    [
        (
            "Residual",
            ["first", "last"],
            r"Residual cannot be cut: its forward computes add .*models.py, line \d+: .* in a row",
        ),
        ("shared_block", ["0", "123"], "'2' .Linear. is the same object in the nodes '0' and '2'"),
        ("deep", ["012", "3456"], "'7': claimed by no partition"),
    ],
)
def test_models_that_cannot_be_cut_so(model: str, partitions: list[str], reason: str) -> None:
    split = tuple(tuple(each) if each.isdigit() else (each,) for each in partitions)
    with pytest.raises(InvalidInputError, match=reason):
        Party(deep_job(model), StageAssignment(split, (0, 1)))


def test_placements_are_checked() -> None:
    with pytest.raises(InvalidInputError, match=r"ranks: .* one of 0, 1, … per partition"):
        StageAssignment((("a",), ("b",)), (0, 2))
    with pytest.raises(InvalidInputError, match="schedule: 'dual' is not one of auto, 1f1b"):
        StageAssignment((("a",),), (0,), schedule="dual")


def test_momentum_of_a_branch_that_nothing_reaches() -> None:
    """The loss uses one head only: the other keeps its parameters, weight decay and all."""
    spec = deep_job({"graph": BRANCHES | {"outputs": ["left"]}}, optimizer=SGD)
    party = Party(spec, StageAssignment((("a", "norm"), ("right",), ("left",)), (0, 1, 2), 4))
    before = {name: tensor.clone() for name, tensor in party.model().items()}
    assert party.train(3) == sharded_loop(spec, ALLOWED, 1, 3, micro_batch_size=4).losses
    assert torch.equal(party.model()["right.weight"], before["right.weight"])
    assert not torch.equal(party.model()["left.weight"], before["left.weight"])


def test_a_message_that_does_not_come_is_named() -> None:
    """By stages, micro-batch and direction; the first rank never begins."""
    party = Party(deep_job(), StageAssignment(cut(DEEP, 3, 5), (0, 1), 3), timeout_s=0.05)
    with pytest.raises(
        ExchangeError,
        match="stage 1 got no activation of micro-batch 0 from stage 0: receive of boundary 0",
    ):
        party.each(lambda runner: runner.train_step() if runner is party.runners[1] else None)
