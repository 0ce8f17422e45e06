"""The estimate against peaks of real steps, and what divides what."""

import tracemalloc
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.compression import TensorLayout
from stratagem.common.job import CompressionSpec, JobSpec
from stratagem.common.tensors.open_files import MAX_COPY_BYTES
from stratagem.tools.planning.codec_memory import codec_memory
from stratagem.tools.planning.gossip_memory import coded_copies, num_known, plain_copies
from stratagem.tools.planning.measured_step import measure_training
from stratagem.tools.planning.memory_estimate import estimate_memory
from stratagem.tools.planning.received_states import num_copied, num_received
from stratagem.tools.planning.step_memory import StepMemory, text_of
from stratagem.worker.engine import GossipTrainer, build_sliced_trainer, build_trainer
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners
from stratagem.worker.exchange.reducer import solo_exchange
from stratagem.worker.session.session_states import NUM_SNAPSHOTS
from tests.cluster.jobs import population
from tests.jobs import NOT_TRAINED, job, user_model
from tests.tools.planning.support import SITE, kind_job, replicas
from tests.worker.engine.gossip_nodes import gossip_job
from tests.worker.engine.gossip_nodes import trainer as gossip_trainer

KINDS = ("mlp", "cnn", "transformer", "rnn", "embedding")
FEDERATED = {
    "type": "Federated",
    "num_clients": 2,
    "rounds": 1,
    "aggregation": {"method": "FedProx", "mu": 0.1},
    "client_selection": {"method": "All"},
}
SGD = {"name": "sgd", "lr": 0.1}
WIDE = {"entrypoint": "tests.userland.models:mlp", "kwargs": {"hidden": 20_000}}


def estimate(spec: Any, **asked: Any) -> StepMemory:
    return estimate_memory(spec, SITE, **asked)


def test_workers_that_the_strategy_has_no_work_for_are_named() -> None:
    spec = job(user_model("mlp"), strategy=replicas(3))
    assert estimate(spec, num_workers=3) == estimate(spec)
    many = estimate(spec, num_workers=5)
    assert many.total == estimate(spec).total
    assert many.notes[-1] == "of 5 workers the strategy has work for 3"


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_within_15_percent_of_a_measured_peak(kind: str) -> None:
    spec = kind_job(kind)
    measured = measure_training(spec, SITE, ShardOwners(0, 1, 1))
    assert estimate(spec).total == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "changes", "tolerance"),
    [
        ("mlp", {"optimizer": SGD}, 0.05),
        ("cnn", {"execution": {"precision": "Full"}}, 0.05),
        # Processors without 16-bit units unfold what they convolve.
        ("cnn", {"execution": {"precision": "Half"}}, 0.15),
        ("mlp", {"execution": {"precision": "Mixed"}}, 0.05),
        ("transformer", {"execution": {"gradient": {"Checkpointed": 1}}, "batch_size": 4}, 0.05),
    ],
)
def test_optimizer_precision_and_checkpointing_are_in_it(
    kind: str, changes: dict[str, Any], tolerance: float
) -> None:
    spec = kind_job(kind, **changes)
    measured = measure_training(spec, SITE, ShardOwners(0, 1, 1))
    assert estimate(spec).total == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_member_of_three_replicas_is_measured_the_same(num_workers: int) -> None:
    spec = kind_job("mlp", strategy=replicas(3), batch_size=7)
    measured = measure_training(spec, SITE, ShardOwners(0, num_workers, 3))
    assert estimate(spec, num_workers=num_workers).total == pytest.approx(measured, rel=0.02)


def test_the_parts_are_those_of_mixed_arithmetic() -> None:
    """Adam in float32: 4 bytes of parameters, 4 of gradients, 8 of moments, each."""
    found = estimate(kind_job("mlp"))
    per_parameter = [
        part / found.num_parameters for part in (found.parameters, found.gradients, found.optimizer)
    ]
    assert per_parameter == pytest.approx([4, 4, 8], rel=0.01)
    assert found.total == sum(
        (
            *(found.parameters, found.gradients, found.optimizer),
            *(found.activations, found.workspace, found.buffers),
        )
    )
    assert estimate(kind_job("mlp", optimizer=SGD)).optimizer == 0
    doubled = estimate(kind_job("mlp", execution={"precision": "Full"}))
    assert doubled.parameters == 2 * found.parameters
    assert [line.split()[0] for line in str(found).splitlines()[-3:]] == [
        *("total", "snapshots", "needed"),
    ]


def test_a_run_that_commits_again_keeps_two_snapshots() -> None:
    """The older one is what the next one is written over."""
    once = kind_job("mlp", checkpoint=None)
    again = kind_job("mlp", checkpoint={"every": "1 steps"})
    assert estimate(once).num_snapshots == 1
    found = estimate(again)
    assert found.num_snapshots == NUM_SNAPSHOTS == 2
    assert found.needed == found.total + 2 * found.snapshot


def test_what_clients_of_federations_begin_from_is_in_what_is_needed() -> None:
    """A worker keeps two states of each federation whose clients it trains by turns."""
    alone = estimate(kind_job("mlp"))
    assert (alone.num_received, "received" in str(alone)) == (0, False)
    found = estimate(kind_job("mlp", strategy=FEDERATED))
    assert (found.received, found.num_received) == (alone.parameters + alone.buffers, 2)
    assert (alone.num_copied, found.num_copied) == (0, 1)
    assert found.needed == found.total + found.snapshot + 3 * found.received
    assert [line.split()[0] for line in str(found).splitlines()[-4:]] == [
        *("snapshots", "received", "copied", "needed"),
    ]


@pytest.mark.parametrize(
    ("num_members", "state_bytes", "number"),
    [(1, 1, 2), (3, 1, 6), (8, 1, 16), (30, 1, 16), (8, 2**30, 4), (8, 2**40, 2), (8, 0, 16)],
)
def test_as_many_states_are_kept_as_federations_and_memory_allow(
    num_members: int, state_bytes: int, number: int
) -> None:
    federations = population(size=num_members, options={"inner": FEDERATED})
    assert num_received(federations, state_bytes) == number
    assert num_received(population(size=num_members), state_bytes) == 0


@pytest.mark.parametrize(
    ("num_members", "update_bytes", "number"),
    [(1, 1, 1), (3, MAX_COPY_BYTES, 3), (30, 1, 8), (3, MAX_COPY_BYTES + 1, 0)],
)
def test_an_update_is_copied_for_each_federation_where_it_is_small_enough(
    num_members: int, update_bytes: int, number: int
) -> None:
    federations = population(size=num_members, options={"inner": FEDERATED})
    assert num_copied(federations, update_bytes) == number
    assert num_copied(population(size=num_members), update_bytes) == 0


def test_rows_only_change_activations_and_workspace() -> None:
    one_layer = {"kwargs": {"depth": 1}}
    small = estimate(kind_job("transformer", **one_layer, batch_size=4))
    large = estimate(kind_job("transformer", **one_layer))
    assert large.activations == pytest.approx(4 * small.activations, rel=0.01)
    assert (large.parameters, large.gradients, large.optimizer) == (
        *(small.parameters, small.gradients, small.optimizer),
    )
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


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_that_divide_the_optimizer_hold_their_slices(num_workers: int) -> None:
    """Against what the pieces of the member with most of them have after a step."""
    strategy = {**replicas(4), "options": {"partition_state": "optimizer"}}
    spec = kind_job("mlp", strategy=strategy)
    whole = estimate(kind_job("mlp", strategy=replicas(4)), num_workers=num_workers)
    found = estimate(spec, num_workers=num_workers)
    held = []
    for rank in range(num_workers):
        share = StateShare(rank, num_workers, num_workers >= 3)
        trainer = build_sliced_trainer(
            spec, SITE.entrypoints, share, device=SITE.device, fresh=True
        )
        assert trainer.pieces is not None
        held.append(sum(2 * piece.nbytes for piece in trainer.pieces.tensors))
    assert found.optimizer == pytest.approx(max(held), rel=0.01)
    assert whole.total - found.total == whole.optimizer - found.optimizer
    alone = replicas(4) | {"options": {"partition_state": "optimizer", "mirror": 0}}
    owned = estimate(kind_job("mlp", strategy=alone), num_workers=num_workers)
    for divided in (found, owned):  # of the parameters as much as of either moment
        saved = 1.5 * (whole.optimizer - divided.optimizer)
        assert whole.snapshot - divided.snapshot == pytest.approx(saved, rel=0.01)
    assert owned.optimizer <= found.optimizer
    with pytest.raises(InvalidInputError, match="it is not measured"):
        estimate(spec, num_workers=num_workers, measure=True)


@pytest.mark.parametrize(("num_workers", "mirror"), [(1, 1), (2, 0), (2, 1), (4, 0), (4, 1)])
def test_workers_that_divide_parameters_hold_slices_and_one_layer(
    num_workers: int, mirror: int
) -> None:
    options = {"partition_state": "full", "mirror": mirror}
    strategy = {**replicas(num_workers), "options": options}
    # Ten layers, of which the middle ones have 65,792 parameters each.
    adam = {"name": "adam", "lr": 0.001}
    whole = estimate(job("heavy", optimizer=adam, strategy=replicas(num_workers)))
    spec = job("heavy", optimizer=adam, strategy=strategy)
    found = estimate(spec, num_workers=num_workers)
    held = []
    for rank in range(num_workers):
        is_mirrored = mirror == 1 and num_workers > 1
        share = StateShare(rank, num_workers, is_mirrored, is_full=True)
        trainer = build_sliced_trainer(
            spec, SITE.entrypoints, share, device=SITE.device, fresh=True
        )
        assert trainer.pieces is not None
        held.append(sum(piece.nbytes for piece in trainer.pieces.tensors))
    assert found.parameters == pytest.approx(max(held) + 4 * 65_792, rel=0.01)
    assert found.optimizer == pytest.approx(2 * max(held), rel=0.01)
    assert found.snapshot == pytest.approx(3 * max(held), rel=0.01)
    assert whole.parameters * (2 if is_mirrored else 1) == pytest.approx(sum(held), rel=0.01)


def test_phases_keep_gradients() -> None:
    plain, held = (
        estimate(kind_job("mlp")),
        estimate(kind_job("mlp", phases={"predictor": {"history": 5}})),
    )
    assert held.gradients - plain.gradients == 4 * plain.num_parameters * 8
    assert held.activations == plain.activations


def test_inference_holds_the_weights_and_one_layer() -> None:
    found = estimate(kind_job("mlp"), inference=True)
    assert (found.gradients, found.optimizer) == (0, 0)
    assert found.total < found.parameters + estimate(kind_job("mlp")).activations


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
            {"node_ids": ["0", "1", "2", "3", "4", "5"], "target": {"WorkerId": "a"}},
            {"node_ids": ["6", "7", "8"], "target": {"WorkerId": "b"}},
        ],
        "communication": {"protocol": "Pipeline", "micro_batch_size": 4},
    }
    whole, stage = estimate(kind_job("mlp")), estimate(kind_job("mlp", strategy=cut))
    assert 0.6 * whole.parameters < stage.parameters < 0.8 * whole.parameters
    first, second = stage.notes  # the need of each
    assert first == f"stage 0 of 2: {text_of(stage.total)}, 3 micro-batches at one time"
    assert second.startswith("stage 1 of 2: ")
    assert text_of(stage.total) not in second


def test_gossip_keeps_a_model_for_each_node_and_the_mean() -> None:
    spec, one = nodes(4, "ring"), estimate(kind_job("mlp")).parameters
    assert estimate(spec, num_workers=2).parameters == 3 * one
    assert estimate(spec, num_workers=4).parameters == 2 * one


def nodes(number: int, topology: str, **changes: Any) -> JobSpec:
    aggregation = {"method": "Decentralized", "topology": topology}
    strategy = {"type": "DataParallel", "num_replicas": number, "aggregation": aggregation}
    return kind_job("mlp", strategy=strategy, **changes)


@pytest.mark.parametrize(
    ("topology", "num_members", "known"), [("ring", 6, 3), ("ring", 2, 5), ("star", 6, 6)]
)
def test_gossip_copies_those_it_listens_to(topology: str, num_members: int, known: int) -> None:
    assert num_known(topology, 6, num_members, seed=0) == known
    note = estimate(nodes(6, topology), num_workers=num_members).notes[0]
    assert f"copies of {known}, " in note


def test_what_gossip_copies_is_what_its_exchange_holds() -> None:
    trainer, exchange = gossip_trainer(gossip_job({**WIDE}, 3))
    trainer.train_step(exchange, range(3), 3)
    held = [*exchange._pool.values(), *exchange._scratch.values()]
    found = plain_copies(3, layout_of(trainer), torch.float32)
    assert found.held == sum(each.nbytes for each in held)


@pytest.mark.parametrize("codec", ["int8", "low_rank"])
def test_public_copies_are_what_numpy_holds(codec: str) -> None:
    """Between steps, and at the worst moment of one."""
    spec = gossip_job({**WIDE}, 3, compression=codec)
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
    def evaluating(predictions: bool) -> JobSpec:
        evaluation = {"split": "train", "batch_size": 16, "predictions": predictions}
        return JobSpec.parse(
            {
                "name": "plan",
                "model": {"entrypoint": "tests.userland.kinds:mlp"},
                "data": {"entrypoint": "tests.userland.kinds:mlp_data"},
                "loss": "cross_entropy",
                "evaluation": evaluation,
                "execution": {"gradient": "None"},
                "strategy": replicas(2),
            }
        )

    kept, plain = (estimate(evaluating(each), num_workers=num_workers) for each in (True, False))
    assert kept.buffers - plain.buffers == own_rows * 10 * 4


def test_fedprox_keeps_the_parameters_of_the_round() -> None:
    spec = kind_job("mlp", strategy=FEDERATED, steps=None)
    assert estimate(spec).parameters == 2 * estimate(kind_job("mlp")).parameters


def test_a_measured_step_corrects_the_estimate() -> None:
    found = estimate(kind_job("rnn"), measure=True)
    assert found.calibrated_by == "a measured step"
    assert found.total == found.measured
    spec = kind_job("mlp", strategy=FEDERATED, steps=None)
    with pytest.raises(InvalidInputError, match="not measured by one worker"):
        estimate(spec, measure=True)


def test_what_cannot_be_estimated_says_why() -> None:
    with pytest.raises(InvalidInputError, match="num_workers: 0"):
        estimate(kind_job("mlp"), num_workers=0)
    with pytest.raises(UserCodeError, match="same reduction dim"):
        estimate(kind_job("mlp", kwargs={"width": 7}))


@pytest.mark.parametrize("model", ["WordsForCausalLM", "Regression"])
def test_a_batch_that_is_input_and_target_is_estimated(model: str) -> None:
    data = "numbers" if model == "Regression" else "words"
    spec = job(
        user_model(f"returning:{model}"),
        data={"entrypoint": f"tests.userland.returning:{data}"},
        loss={"name": "model"},
        evaluation={"split": "train"},
    )
    assert estimate(spec).activations > 0
    assert estimate(spec, inference=True).total > 0


def test_a_step_of_the_users_is_estimated() -> None:
    spec = job(loss=None, step="tests.userland.steps:noisy", strategy=replicas(2))
    assert estimate(spec).activations > 0


def test_the_control_variates_of_a_client_are_counted() -> None:
    """c, c_k, their difference and its copy; Δc goes with the update."""
    plain = {**FEDERATED, "aggregation": {"method": "FedAvg"}}
    controlled = {**plain, "options": {"control": "scaffold"}}
    without, found = (
        estimate(kind_job("mlp", strategy=each, steps=None, optimizer=SGD))
        for each in (plain, controlled)
    )
    variate = 4 * found.num_parameters
    assert found.gradients - without.gradients == 4 * variate
    assert found.snapshot - without.snapshot == variate
    assert "control variate" in found.notes[-1]
