"""The estimate against peaks of real steps, and what divides what."""

import tracemalloc
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.compression import TensorLayout
from stratagem.common.job import CompressionSpec, JobSpec
from stratagem.common.tensors.local_files import MAX_COPY_BYTES
from stratagem.tools.memory.estimate import text_of
from stratagem.tools.memory.play import measure_training
from stratagem.tools.memory.strategies import (
    codec_memory,
    coded_copies,
    num_copied,
    num_known,
    num_received,
    plain_copies,
)
from stratagem.worker.engine import GossipTrainer, build_trainer
from stratagem.worker.engine.slices import StateShare
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.layout import ShardOwners
from stratagem.worker.exchange.reducer import solo_exchange
from stratagem.worker.session.states import NUM_SNAPSHOTS
from tests.cluster.jobs import population
from tests.jobs import NOT_TRAINED, job, user_model
from tests.tools.memory.support import SITE, estimate, federation, kind_job, replicas
from tests.worker.engine.gossip_nodes import gossip_job
from tests.worker.engine.gossip_nodes import trainer as gossip_trainer

FEDERATED = federation({"method": "FedProx", "mu": 0.1})
AVG = {"method": "FedAvg"}
SGD = {"name": "sgd", "lr": 0.1}
WIDE = {"entrypoint": "tests.userland.models:mlp", "kwargs": {"hidden": 12_000}}
MLP = kind_job("mlp")
ALONE = ShardOwners(0, 1, 1)


@pytest.mark.parametrize(
    ("kind", "changes", "tolerance"),
    [
        ("embedding", {}, 0.15),
        ("mlp", {"optimizer": SGD}, 0.05),
        ("cnn", {"execution": {"precision": "Full"}}, 0.05),
        # Processors without 16-bit units unfold what they convolve.
        pytest.param("cnn", {"execution": {"precision": "Half"}}, 0.15, marks=pytest.mark.sweep),
        ("mlp", {"execution": {"precision": "Mixed"}}, 0.05),
        ("transformer", {"execution": {"gradient": {"Checkpointed": 1}}, "batch_size": 4}, 0.05),
        ("rnn", {}, 0.15),
    ],
)
def test_the_estimate_is_near_a_measured_peak(kind: str, changes: Any, tolerance: float) -> None:
    """Of five kinds of model, with their optimizer, precision and checkpoints of activations."""
    spec = kind_job(kind, **changes)
    measured = measure_training(spec, SITE, ALONE)
    assert estimate(spec).total == pytest.approx(measured, rel=tolerance)


def test_a_member_of_three_replicas_is_measured_the_same() -> None:
    """The first of two, which has two of them."""
    spec = kind_job("mlp", strategy=replicas(3), batch_size=7)
    measured = measure_training(spec, SITE, ShardOwners(0, 2, 3))
    assert estimate(spec, num_workers=2).total == pytest.approx(measured, rel=0.02)


def test_the_parts_are_those_of_mixed_arithmetic() -> None:
    """Adam in float32: 4 bytes of parameters, 4 of gradients, 8 of moments, each."""
    found = estimate(MLP)
    per_parameter = [
        part / found.num_parameters for part in (found.parameters, found.gradients, found.optimizer)
    ]
    assert per_parameter == pytest.approx([4, 4, 8], rel=0.01)
    held = found.parameters + found.gradients + found.optimizer
    assert found.total == held + found.activations + found.workspace + found.buffers
    assert estimate(kind_job("mlp", optimizer=SGD)).optimizer == 0
    doubled = estimate(kind_job("mlp", execution={"precision": "Full"}))
    assert doubled.parameters == 2 * found.parameters
    told = [line.split()[0] for line in str(found).splitlines()[-3:]]
    assert told == ["total", "snapshots", "needed"]


def test_a_run_that_commits_again_keeps_two_snapshots_and_unused_workers_are_named() -> None:
    """The older one is what the next one is written over."""
    assert estimate(kind_job("mlp", checkpoint=None)).num_snapshots == 1
    found = estimate(MLP)
    assert found.num_snapshots == NUM_SNAPSHOTS == 2
    assert found.needed == found.total + 2 * found.snapshot
    spec = job(user_model("mlp"), strategy=replicas(3))
    assert estimate(spec, num_workers=3) == estimate(spec)
    many = estimate(spec, num_workers=5)
    assert many.total == estimate(spec).total
    assert many.notes[-1] == "of 5 workers the strategy has work for 3"


def test_what_clients_of_federations_begin_from_is_in_what_is_needed() -> None:
    """A worker keeps two states of each federation whose clients it trains by turns."""
    alone = estimate(MLP)
    assert (alone.num_received, "received" in str(alone)) == (0, False)
    found = estimate(kind_job("mlp", strategy=FEDERATED, steps=None))
    assert (found.received, found.num_received) == (alone.parameters + alone.buffers, 2)
    assert (alone.num_copied, found.num_copied) == (0, 1)
    assert found.needed == found.total + found.snapshot + 3 * found.received
    told = [line.split()[0] for line in str(found).splitlines()[-4:]]
    assert told == ["snapshots", "received", "copied", "needed"]
    # And for FedProx the parameters of the round.
    assert found.parameters == 2 * alone.parameters


def test_states_are_kept_and_updates_copied_as_federations_and_memory_allow() -> None:
    received = {(1, 1): 2, (3, 1): 6, (8, 1): 16, (30, 1): 16, (8, 2**30): 4}
    received |= {(8, 2**40): 2, (8, 0): 16}
    copied = {(1, 1): 1, (3, MAX_COPY_BYTES): 3, (30, 1): 8, (3, MAX_COPY_BYTES + 1): 0}
    for count, table in ((num_received, received), (num_copied, copied)):
        for (size, num_bytes), number in table.items():
            federations = population(size=size, options={"inner": FEDERATED})
            assert count(federations, num_bytes) == number
            assert count(population(size=size), num_bytes) == 0


def test_rows_only_change_activations_and_workspace() -> None:
    one_layer = {"kwargs": {"depth": 1}}
    small = estimate(kind_job("transformer", **one_layer, batch_size=4))
    large = estimate(kind_job("transformer", **one_layer))
    assert large.activations == pytest.approx(4 * small.activations, rel=0.01)
    assert (large.parameters, large.gradients) == (small.parameters, small.gradients)
    assert large.optimizer == small.optimizer
    halved = estimate(kind_job("transformer", **one_layer, strategy=replicas(4)))
    assert halved.activations == pytest.approx(small.activations, rel=0.01)


def test_accumulation_divides_the_rows_of_a_pass_and_nothing_else() -> None:
    spec = kind_job("mlp", execution={"gradient": {"Accumulated": 5}}, batch_size=64)
    found, whole = estimate(spec), estimate(kind_job("mlp", batch_size=64))
    assert (found.rows, found.gradients) == (13, whole.gradients)
    assert found.activations < whole.activations / 4
    measured = measure_training(spec, SITE, ShardOwners(0, 1, 1))
    assert found.total == pytest.approx(measured, rel=0.02)
    assert found == estimate(kind_job("mlp", accumulation={"steps": 5}, batch_size=64))


@pytest.mark.parametrize(
    "codec",
    [
        *("ternary", "low_rank"),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("fp16", "int8", "top_k", "vsa")),
    ],
)
def test_what_a_codec_takes_is_in_it(codec: str) -> None:
    """Against the peak of what numpy holds in the second step of one worker with two shards."""
    spec = kind_job("mlp", strategy=replicas(2), compression=codec)
    trainer = build_trainer(spec, SITE.entrypoints, device=SITE.device, fresh=True)
    buckets = GradientBuckets(trainer.params, num_extras=trainer.num_extras)
    exchange = solo_exchange(buckets, 2, trainer.compressor)
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    trainer.train_step(exchange, range(2), 2)
    tracemalloc.reset_peak()
    trainer.train_step(exchange, range(2), 2)
    measured = tracemalloc.get_traced_memory()[1] - start
    tracemalloc.stop()
    found = codec_memory(spec.compression, trainer.compressor.layout)  # type: ignore[arg-type, union-attr]
    assert 2 * (2 * found.state + found.payload) + found.scratch == pytest.approx(
        measured, rel=0.25
    )
    one_worker = estimate(spec, num_workers=1)
    plain = estimate(kind_job("mlp", strategy=replicas(2)), num_workers=1)
    assert one_worker.gradients - plain.gradients == 2 * (2 * found.state + found.payload)
    assert one_worker.workspace >= plain.workspace
    assert not one_worker.notes


def test_a_codec_takes_memory_in_proportion() -> None:
    small = [TensorLayout("w", (500, 500)), TensorLayout("b", (500,))]
    large = [TensorLayout("w", (2000, 2000)), TensorLayout("b", (8000,))]
    spec = CompressionSpec(codec="ternary")
    one, sixteen = codec_memory(spec, small), codec_memory(spec, large)
    assert sixteen.scratch == pytest.approx(16 * one.scratch, rel=0.1)
    assert sixteen.state == pytest.approx(16 * one.state, rel=0.05)


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.sweep), 4])
def test_workers_that_divide_the_optimizer_hold_their_slices(num_workers: int) -> None:
    """Against what the pieces of the member with most of them have after a step."""
    spec = kind_job("mlp", strategy=replicas(4, partition_state="optimizer"))
    whole = estimate(kind_job("mlp", strategy=replicas(4)), num_workers=num_workers)
    found = estimate(spec, num_workers=num_workers)
    held = []
    for rank in range(num_workers):
        held.append(2 * bytes_of_pieces(spec, StateShare(rank, num_workers, num_workers >= 3)))
    assert found.optimizer == pytest.approx(max(held), rel=0.01)
    assert whole.total - found.total == whole.optimizer - found.optimizer
    alone = replicas(4, partition_state="optimizer", mirror=0)
    owned = estimate(kind_job("mlp", strategy=alone), num_workers=num_workers)
    for divided in (found, owned):  # of the parameters as much as of either moment
        saved = 1.5 * (whole.optimizer - divided.optimizer)
        assert whole.snapshot - divided.snapshot == pytest.approx(saved, rel=0.01)
    assert owned.optimizer <= found.optimizer
    with pytest.raises(InvalidInputError, match="it is not measured"):
        estimate(spec, num_workers=num_workers, measure=True)


def bytes_of_pieces(spec: JobSpec, share: StateShare) -> int:
    trainer = build_trainer(spec, SITE.entrypoints, share, device=SITE.device, fresh=True)
    assert trainer.pieces is not None
    return sum(piece.nbytes for piece in trainer.pieces.tensors)


@pytest.mark.parametrize(
    ("num_workers", "mirror"), [pytest.param(1, 1, marks=pytest.mark.sweep), (2, 0), (4, 1)]
)
def test_workers_that_divide_parameters_hold_one_layer(num_workers: int, mirror: int) -> None:
    strategy = replicas(num_workers, partition_state="full", mirror=mirror)
    # Ten layers, of which the middle ones have 65,792 parameters each.
    adam = {"name": "adam", "lr": 0.001}
    whole = estimate(job("heavy", optimizer=adam, strategy=replicas(num_workers)))
    spec = job("heavy", optimizer=adam, strategy=strategy)
    found = estimate(spec, num_workers=num_workers)
    is_mirrored = mirror == 1 and num_workers > 1
    shares = (
        StateShare(rank, num_workers, is_mirrored, is_full=True) for rank in range(num_workers)
    )
    held = [bytes_of_pieces(spec, share) for share in shares]
    assert found.parameters == pytest.approx(max(held) + 4 * 65_792, rel=0.01)
    assert found.optimizer == pytest.approx(2 * max(held), rel=0.01)
    assert found.snapshot == pytest.approx(3 * max(held), rel=0.01)
    assert whole.parameters * (2 if is_mirrored else 1) == pytest.approx(sum(held), rel=0.01)


def test_phases_keep_gradients_and_inference_the_weights_and_one_layer() -> None:
    plain, held = estimate(MLP), estimate(kind_job("mlp", phases={"predictor": {"history": 5}}))
    assert held.gradients - plain.gradients == 4 * plain.num_parameters * 8
    assert held.activations == plain.activations
    found = estimate(kind_job("mlp"), inference=True)
    assert (found.gradients, found.optimizer) == (0, 0)
    assert found.total < found.parameters + estimate(MLP).activations


def test_a_model_that_returns_its_loss_is_called_with_the_keys_of_its_batches() -> None:
    model = {"entrypoint": "tests.userland.returning:WordsForCausalLM", "kwargs": {}}
    data = {"entrypoint": "tests.userland.returning:words", "kwargs": {}}
    sections: dict[str, Any] = {"model": model, "data": data, "loss": "model"}
    trained = estimate(JobSpec.parse({**kind_job("mlp").document(), **sections}))
    assert trained.parameters == (2 * 12 * 8 + 12) * 4
    evaluated = estimate(job(**NOT_TRAINED, **sections, evaluation={"metrics": ["accuracy"]}))
    assert evaluated.parameters == trained.parameters


def test_a_pipeline_is_its_heaviest_stage() -> None:
    cut = {
        "type": "ModelParallel",
        "partitions": [
            {"node_ids": ["0", "1", "2", "3"], "target": {"WorkerId": "a"}},
            {"node_ids": ["4", "5", "6"], "target": {"WorkerId": "b"}},
        ],
        "communication": {"protocol": "Pipeline", "micro_batch_size": 4},
    }
    deep = {"depth": 3}
    whole, stage = (
        estimate(kind_job("mlp", kwargs=deep, **own)) for own in ({}, {"strategy": cut})
    )
    assert 0.6 * whole.parameters < stage.parameters < 0.8 * whole.parameters
    first, second = stage.notes  # the need of each
    assert first == f"stage 0 of 2: {text_of(stage.total)}, 3 micro-batches at one time"
    assert second.startswith("stage 1 of 2: ")
    assert text_of(stage.total) not in second


def nodes(number: int, topology: str, **changes: Any) -> JobSpec:
    aggregation = {"method": "Decentralized", "topology": topology}
    strategy = {"type": "DataParallel", "num_replicas": number, "aggregation": aggregation}
    return kind_job("mlp", strategy=strategy, **changes)


def test_what_gossip_copies_is_what_its_exchange_holds_of_those_it_listens_to() -> None:
    trainer, exchange = gossip_trainer(gossip_job(WIDE, 3))
    trainer.train_step(exchange, range(3), 3)
    held = [*exchange._pool.values(), *exchange._scratch.values()]
    found = plain_copies(3, layout_of(trainer), torch.float32)
    assert found.held == sum(each.nbytes for each in held)
    for topology, num_members, known in (("ring", 6, 3), ("ring", 2, 5), ("star", 6, 6)):
        assert num_known(topology, 6, num_members, seed=0) == known
    assert "copies of 5, " in estimate(nodes(6, "ring"), num_workers=2).notes[0]
    spec, one = nodes(4, "ring"), estimate(MLP).parameters
    assert estimate(spec, num_workers=2).parameters == 3 * one
    assert estimate(spec, num_workers=4).parameters == 2 * one


@pytest.mark.parametrize("codec", ["int8", "low_rank"])
def test_public_copies_are_what_numpy_holds(codec: str) -> None:
    """Between steps, and at the worst moment of one."""
    spec = gossip_job(WIDE, 3, compression=codec)
    tracemalloc.start()
    trainer, exchange = gossip_trainer(spec)
    trainer.train_step(exchange, range(3), 3)
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    trainer.train_step(exchange, range(3), 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = coded_copies(3, 3, layout_of(trainer), spec)
    assert found.held == pytest.approx(held, rel=0.1)
    assert found.held + found.moment == pytest.approx(peak, rel=0.25)


def layout_of(trainer: GossipTrainer) -> tuple[TensorLayout, ...]:
    named = trainer.model.named_parameters()
    return tuple(TensorLayout(name, tuple(param.shape)) for name, param in named)


@pytest.mark.parametrize(("num_workers", "own_rows"), [(1, 256), (2, 128)])
def test_predictions_that_are_kept_are_in_it(num_workers: int, own_rows: int) -> None:
    def buffers(predictions: bool) -> int:
        evaluation = {"split": "train", "batch_size": 16, "predictions": predictions}
        spec = kind_job("mlp", **NOT_TRAINED, evaluation=evaluation, strategy=replicas(2))
        return estimate(spec, num_workers=num_workers).buffers

    assert buffers(True) - buffers(False) == own_rows * 10 * 4


def test_a_measured_step_corrects_the_estimate() -> None:
    found = estimate(kind_job("mlp", kwargs={"depth": 1}), measure=True)
    assert found.calibrated_by == "a measured step"
    assert found.total == found.measured
    spec = kind_job("mlp", strategy=FEDERATED, steps=None)
    with pytest.raises(InvalidInputError, match="not measured by one worker"):
        estimate(spec, measure=True)
    with pytest.raises(InvalidInputError, match="num_workers: 0"):
        estimate(kind_job("mlp"), num_workers=0)
    with pytest.raises(UserCodeError, match="same reduction dim"):
        estimate(kind_job("mlp", kwargs={"width": 7}))


def test_a_batch_that_is_input_and_target_and_a_step_of_the_users_are_estimated() -> None:
    spec = job(
        user_model("returning:Regression"),
        data={"entrypoint": "tests.userland.returning:numbers"},
        loss={"name": "model"},
        evaluation={"split": "train"},
    )
    assert estimate(spec).activations > 0
    assert estimate(spec, inference=True).total > 0
    spec = job(loss=None, step="tests.userland.steps:noisy", strategy=replicas(2))
    assert estimate(spec).activations > 0


def test_the_control_variates_of_a_client_are_counted() -> None:
    """c, c_k, their difference and its copy; Δc goes with the update."""
    without, found = (
        estimate(kind_job("mlp", strategy=each, steps=None, optimizer=SGD))
        for each in (federation(AVG), federation(AVG, control="scaffold"))
    )
    variate = 4 * found.num_parameters
    assert found.gradients - without.gradients == 4 * variate
    assert found.snapshot - without.snapshot == variate
    assert "control variate" in found.notes[-1]
