"""Micro-batches: their sums against the references, and a window as one transaction."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import AccumulationSpec, JobSpec
from stratagem.common.numerics.rules import CURRENT, FIRST
from stratagem.worker.engine import Tally, Trainer
from stratagem.worker.exchange import GradientReducer, solo_exchange
from stratagem.worker.exchange.layout import ShardOwners
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.federated.client_trainer import ClientRunner
from stratagem.worker.host.stalls import checking, per_thread
from tests.jobs import job, user_data, user_model
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop
from tests.worker.engine import client_rounds as rounds
from tests.worker.engine import gossip_nodes as gossip
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_equals_loop,
    assert_same_bits,
    model_of,
    solo,
    train,
    trainer_of,
)
from tests.worker.exchange.cases import buckets_of, no_scalars

ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5}
TOKENS: dict[str, Any] = {"data": user_data("tokens"), "loss": "token_cross_entropy"}


OF_ROWS = user_data("classes", num_rows=48)


@given(num_rows=st.integers(0, 60), size=st.integers(1, 20))
def test_cuts_are_whole_and_in_order(num_rows: int, size: int) -> None:
    by_rows = AccumulationSpec(micro_batch_size=size).cut(num_rows)
    by_count = AccumulationSpec(steps=size).cut(num_rows)
    for cuts in (by_rows, by_count, AccumulationSpec().cut(num_rows)):
        assert [row for cut in cuts for row in cut] == list(range(num_rows))
        assert all(cuts)
    assert all(len(cut) == size for cut in by_rows[:-1])
    assert len(by_count) == min(size, num_rows)
    assert max(map(len, by_count), default=0) - min(map(len, by_count), default=0) <= 1


# ---- the same bits as the references ----


@settings(max_examples=12)
@given(
    num_rows=st.integers(2, 23),
    batch_size=st.integers(2, 11),
    num_shards=st.integers(1, 5),
    micro_batch_size=st.integers(1, 11),
    normalize=st.sampled_from(["mean", "sum"]),
)
def test_any_split_equals_the_sharded_loop(
    num_rows: int, batch_size: int, num_shards: int, micro_batch_size: int, normalize: str
) -> None:
    accumulation = {"micro_batch_size": min(micro_batch_size, batch_size), "normalize": normalize}
    data = user_data("classes", num_rows=num_rows)
    spec = job(batch_size=batch_size, data=data, steps=3, accumulation=accumulation)
    assert_equals_loop(spec, num_shards, 3)


def test_a_sum_is_not_divided() -> None:
    """With plain SGD, the step of a sum is that of the mean at batch_size times the rate."""
    sgd = {"name": "sgd", "lr": 0.01}
    summed = job(
        optimizer=sgd,
        data=OF_ROWS,
        execution={"precision": "Full"},
        accumulation={"steps": 3, "normalize": "sum"},
    )
    mean = job(optimizer={**sgd, "lr": 0.16}, data=OF_ROWS, execution={"precision": "Full"})
    first, second = trainer_of(summed), trainer_of(mean)
    train(first, 2, 5)
    train(second, 2, 5)
    for name, tensor in model_of(first).items():
        torch.testing.assert_close(tensor, model_of(second)[name], rtol=0, atol=1e-12)


def test_federated_and_gossip_micro_batches_make_one_big_batch() -> None:
    common: dict[str, Any] = {"batch_size": 7, "execution": {"precision": "Full"}, **TOKENS}
    cut: dict[str, Any] = {"accumulation": {"micro_batch_size": 3}}
    clients, nodes = (
        [make(**common, **changes) for changes in ({}, cut)]
        for make in (
            partial(rounds.federated, "token_model", rounds=2),
            partial(gossip.gossip_job, "token_model", 3, steps=6),
        )
    )
    states = [federated_loop(spec, ALLOWED).state for spec in clients]
    states += [gossip_loop(spec, ALLOWED).mean for spec in nodes]
    for first, second in (states[:2], states[2:]):
        for name, tensor in first.items():
            assert (tensor - second[name]).abs().max() <= 1e-12, name


# ---- one exchange for the window ----


class Recorder(SoloTransport):
    """Notes which buckets were handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[int] = []

    def launch(self, bucket: int) -> None:
        self.launched.append(bucket)


def test_buckets_leave_during_the_last_backward_of_several() -> None:
    kinds = [torch.float32, torch.float64] * 2  # so that each parameter has its own bucket
    params = [(f"p{i}", nn.Parameter(torch.ones(4, dtype=kind))) for i, kind in enumerate(kinds)]
    recorder = Recorder()
    buckets = buckets_of(params)
    exchange = GradientReducer(buckets, ShardOwners(0, 1, 1), recorder)
    notes: list[tuple[int, list[int]]] = []
    for index, (_, param) in enumerate(params):
        param.register_post_accumulate_grad_hook(
            lambda _, i=index: notes.append((i, list(recorder.launched)))
        )
    exchange.begin_step(1, range(1), 1)
    exchange.begin_shard(0, num_micro_batches=3)
    for reached in ([0, 1, 2, 3], [1], [0, 2, 3]):  # p1 is absent from the last
        if reached != [0, 1, 2, 3]:
            exchange.next_micro_batch()
        value = torch.ones((), dtype=torch.float64)
        for index in reached:
            value = value * params[index][1].sum()
        value.backward()
    assert notes[:5] == [(i, []) for i, _ in notes[:5]]
    # p3 and p2 are complete within the last backward; p1's bucket waits for the end of the shard.
    assert recorder.launched == [0, 1]
    with pytest.raises(RuntimeError, match="no further micro-batch"):
        exchange.next_micro_batch()
    exchange.end_shard(0, no_scalars(buckets))
    assert recorder.launched == list(range(5))
    exchange.finish()
    assert [param.grad is not None for _, param in params] == [True] * 4
    assert params[1][1].grad is not None
    assert params[1][1].grad.tolist() == [4.0**3 + 1] * 4  # 1 from the micro-batch that has only it


def test_a_shard_with_micro_batches_to_come_cannot_end() -> None:
    trainer = trainer_of(job())
    exchange = solo(trainer, 1)
    exchange.begin_step(1, range(1), 1)
    exchange.begin_shard(0, num_micro_batches=2)
    with pytest.raises(RuntimeError, match="1 micro-batches are still to be computed"):
        exchange.end_shard(0, no_scalars(buckets_of(trainer.params)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_add_up_in_the_wide_bucket(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(5, dtype=dtype))
    exchange = solo_exchange(buckets_of([("p", param)]), 1)
    exchange.begin_step(1, range(1), 1)
    exchange.begin_shard(0, num_micro_batches=3)
    grads = [1.0, 2.0**-9, 2.0**-9]  # each vanishes beside 1 in bfloat16; both together do not
    for number, grad in enumerate(grads):
        if number:
            exchange.next_micro_batch()
        (param * torch.tensor(grad, dtype=dtype)).sum().backward()
    exchange.end_shard(0, no_scalars(exchange.buckets))
    exchange.finish()
    assert exchange.buckets.tensors(0)[0][:5].tolist() == [sum(grads)] * 5


# ---- a window is one transaction ----


def told(at: int = 0, what: str = "", **changes: Any) -> Trainer:
    """A trainer of four micro-batches per step, whose model misbehaves in forward pass `at`."""
    model = user_model("acting_models:Told", at=at, what=what)
    accumulation = {"steps": 4, **changes}
    return trainer_of(job(model, data=OF_ROWS, optimizer=ADAM, accumulation=accumulation))


THIRD_OF_STEP_TWO = 7
THIRD_OF_SECOND_SHARD = 8 + 7


@pytest.mark.parametrize(("num_shards", "at"), [(1, THIRD_OF_STEP_TWO), (2, THIRD_OF_SECOND_SHARD)])
@pytest.mark.parametrize(
    ("what", "error"), [("raise", "as told"), ("nan", "non-finite loss at step 2")]
)
def test_a_failing_micro_batch_drops_its_window(
    what: str, error: str, num_shards: int, at: int
) -> None:
    trainer, undisturbed = told(at, what), told()
    train(trainer, num_shards, 1)
    before, exchange = trainer.copy_state(), solo(trainer, num_shards)
    with pytest.raises(UserCodeError, match=error):
        trainer.train_step(exchange, range(num_shards), num_shards)
    assert trainer.step == 1
    assert_same_bits(trainer.copy_state()[0], before[0])  # parameters, buffers, moments
    assert all(param.grad is None for _, param in trainer.params)
    # Done again over the same storage, it has the bits that it would have had.
    trainer.train_step(exchange, range(num_shards), num_shards)
    train(undisturbed, num_shards, 2)
    assert trainer.fingerprint() == undisturbed.fingerprint()


class Unwanted(Exception):
    """Nobody wants the plan any more."""


def at_third_check() -> Callable[[], None]:
    """A check that raises when it is made for the third time."""
    numbers = count(1)

    def check() -> None:
        if next(numbers) == 3:
            raise Unwanted

    return check


def test_a_plan_that_nobody_wants_ends_between_two_micro_batches() -> None:
    trainer, undisturbed = told(), told()
    train(trainer, 1, 1)
    before, exchange = trainer.copy_state()[0], solo(trainer, 1)
    with checking(at_third_check()), pytest.raises(Unwanted):
        trainer.train_step(exchange, range(1), 1)
    assert_same_bits(trainer.copy_state()[0], before)
    trainer.train_step(exchange, range(1), 1)
    train(undisturbed, 1, 2)
    assert trainer.fingerprint() == undisturbed.fingerprint()


def test_a_client_that_nobody_waits_for_ends_between_two_micro_batches() -> None:
    spec = rounds.federated(data=OF_ROWS, num_clients=1, accumulation={"steps": 4})
    state = {name: t for name, t in trainer_of(spec).copy_state()[0].items() if "model/" in name}
    runner, undisturbed = (ClientRunner(spec, ALLOWED, CPU) for _ in range(2))
    with checking(at_third_check()), pytest.raises(Unwanted):
        runner.run(state, 0, 1, 1)
    again, expected = runner.run(state, 0, 1, 1), undisturbed.run(state, 0, 1, 1)
    assert_same_bits(dict(again.tensors), dict(expected.tensors))


@pytest.mark.parametrize("what", ["copy_state", "fingerprint"])
def test_the_end_of_a_segment_moves_on_from_tensor_to_tensor(what: str) -> None:
    trainer, here = trainer_of(job()), per_thread.activity
    before = here.num_moves
    getattr(trainer, what)()
    assert here.num_moves - before >= len(trainer.params)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_parameter_absent_from_a_micro_batch_adds_nothing_to_it(num_shards: int) -> None:
    """It is divided by the weight of the window, not of the micro-batches that it was in."""
    assert_equals_loop(told(2, "leave out").job, num_shards, 3)


@pytest.mark.parametrize("what", ["nan", "nan gradient"])
def test_a_step_that_is_not_finite_is_skipped(what: str) -> None:
    trainer = told(THIRD_OF_STEP_TWO, what, non_finite="skip_step")
    exchange = solo(trainer, 1)
    trainer.train_step(exchange, range(1), 1)
    before = trainer.copy_state()[0]
    report = trainer.train_step(exchange, range(1), 1)
    assert (report.step, report.num_skipped, report.weight) == (2, 1, 0.0)
    assert math.isfinite(report.loss) == (what == "nan gradient")
    assert not math.isfinite(report.grad_norm)
    assert_same_bits(trainer.copy_state()[0], before)
    report = trainer.train_step(exchange, range(1), 1)
    assert (report.step, report.num_skipped, report.weight) == (3, 0, 16.0)
    expected = sharded_loop(trainer.job, ALLOWED, 1, 3)
    assert_same_bits(model_of(trainer), dict(expected.state))


def test_the_norm_is_that_of_the_whole_gradient_before_clipping() -> None:
    spec = job(optimizer={"name": "sgd", "lr": 0.1}, data=OF_ROWS, execution={"precision": "Full"})
    clipped = job(
        optimizer={"name": "sgd", "lr": 0.1, "clip_norm": 1e-3},
        data=OF_ROWS,
        execution={"precision": "Full"},
        accumulation={"steps": 3},
    )
    free, tight = trainer_of(spec), trainer_of(clipped)
    start = model_of(tight)
    norms = [each.train_step(solo(each, 2), range(2), 2).grad_norm for each in (free, tight)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    moved = [(tensor - start[name]).square().sum() for name, tensor in model_of(tight).items()]
    assert math.sqrt(sum(moved)) == pytest.approx(0.1 * 1e-3, rel=1e-3)
    assert norms[1] > 1e-2


@pytest.mark.parametrize(
    ("precision", "scale", "numerics"), [("Full", 1e200, CURRENT), ("Single", 1e30, FIRST)]
)
def test_an_infinite_norm_of_finite_gradients_is_no_clipped_step(
    precision: str, scale: float, numerics: int
) -> None:
    # Scaling by it would make every gradient zero without a word.
    for clip_norm, is_skipped in ((None, 0), (1.0, 1)):
        trainer = trainer_of(steep(precision, scale, clip_norm), numerics=numerics)
        report = trainer.train_step(solo(trainer, 1), range(1), 1)
        assert (report.grad_norm, report.num_skipped) == (math.inf, is_skipped)
    large = trainer_of(steep("Single", 1e30, 1.0))  # whose squares float64 can add up
    report = large.train_step(solo(large, 1), range(1), 1)
    assert report.num_skipped == 0
    assert 1e29 < report.grad_norm < 1e33


def steep(precision: str, scale: float, clip_norm: float | None) -> JobSpec:
    optimizer = {"name": "sgd", "lr": 1 / scale, "clip_norm": clip_norm}
    return job(
        loss={"entrypoint": "tests.userland.losses:half_squared", "kwargs": {"scale": scale}},
        optimizer={key: value for key, value in optimizer.items() if value is not None},
        accumulation={"non_finite": "skip_step"},
        execution={"precision": precision},
    )


def test_a_segment_without_an_applied_step_has_neither_a_loss_nor_a_norm() -> None:
    """A loss of 0 would be the best of all, and a perfect fit of no row."""
    exploding = user_model("acting_models:Exploding", at_call=1)
    skipping = {"non_finite": "skip_step"}
    made = trainer_of(job(exploding, accumulation=skipping))
    exchange, tally = solo(made, 1), Tally()
    tally.add(made.train_step(exchange, range(1), 1))
    summary = made.end_segment(exchange, tally)
    assert (math.isnan(summary.loss), summary.metrics) == (True, {"skipped_steps": 1})
    spec = gossip.gossip_job(exploding, 2, steps=1, accumulation=skipping)
    nodes, between = gossip.trainer(spec)
    nodes.train_step(between, range(2), 2)
    assert math.isnan(nodes.end_segment(between, Tally()).loss)


def test_clients_and_nodes_skip_alone() -> None:
    told_model: dict[str, Any] = user_model("acting_models:Told", at=THIRD_OF_STEP_TWO, what="nan")
    accumulation = {"steps": 4, "non_finite": "skip_step"}
    common: dict[str, Any] = {"data": OF_ROWS, "optimizer": ADAM, "accumulation": accumulation}
    federated = rounds.federated(told_model, num_clients=1, **common)
    base = trainer_of(federated).copy_state()[0]
    done = ClientRunner(federated, ALLOWED, torch.device("cpu")).run(base, 0, 1, 1)
    assert (done.num_steps, done.metrics["skipped_steps"]) == (3, 1)
    assert_same_bits(
        {name.removeprefix("model/"): tensor for name, tensor in done.tensors.items()},
        dict(federated_loop(federated, ALLOWED, num_rounds=1).state),
    )
    spec = gossip.gossip_job(told_model, 2, steps=3, **common)
    made, exchange = gossip.trainer(spec)
    reports = [made.train_step(exchange, range(2), 2) for _ in range(3)]
    assert [(each.num_skipped, each.weight) for each in reports] == [(0, 16), (2, 0), (0, 16)]
    summary = made.end_segment(exchange, Tally())
    assert summary.metrics["skipped_steps"] == 2
    assert summary.metrics["max_grad_norm"] == max(reports[0].grad_norm, reports[2].grad_norm)
    assert_same_bits(made.model.state_dict(), dict(gossip_loop(spec, ALLOWED).mean))
