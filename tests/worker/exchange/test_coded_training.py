"""Training with a codec: the bits of the compressed loop, whoever owns which shards."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.compression.codec import NonFiniteError
from stratagem.common.job import CompressionSpec, JobSpec, with_fields
from stratagem.common.numerics.rules import CURRENT, FIRST
from stratagem.worker.engine import Trainer
from stratagem.worker.exchange import GradientBuckets, GradientReducer, solo_exchange
from stratagem.worker.exchange.coders import finite_totals
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.exchange.layout import BUCKET_BYTES, ShardOwners, plan_step
from stratagem.worker.exchange.parameter_server import CodedFreight
from stratagem.worker.exchange.transports import SoloTransport
from stratagem.worker.numerics import precision
from tests.common.compression.support import CODECS
from tests.every_pair import every_value
from tests.jobs import job, user_model
from tests.reference.compressed_loop import compressed_loop
from tests.reference.loops import sharded_loop
from tests.worker.engine.gossip_nodes import gossip_job
from tests.worker.engine.gossip_nodes import trainer as gossip_trainer
from tests.worker.engine.support import ALLOWED, assert_same_bits, model_of, trainer_of


def compressed(codec: dict[str, Any], **changes: Any) -> JobSpec:
    strategy = {"type": "DataParallel", "num_replicas": 3, "aggregation": {"method": "AllReduce"}}
    return job("dropout_mlp", compression=codec, strategy=strategy, **changes)


def train(trainer: Trainer, num_steps: int, bucket_bytes: int = BUCKET_BYTES) -> list[float]:
    """bucket_bytes: 1 is a bucket for each parameter, and so a portion that is coded alone."""
    num_extras = trainer.num_extras
    buckets = GradientBuckets(trainer.params, num_extras=num_extras, bucket_bytes=bucket_bytes)
    exchange = solo_exchange(buckets, 3, trainer.compressor)
    return [trainer.train_step(exchange, range(3), 3).loss for _ in range(num_steps)]


@pytest.mark.parametrize(
    ("name", "accumulation", "numerics"),
    [
        *every_value(list(CODECS), [None, {"micro_batch_size": 2}], [CURRENT]),
        *(("fp16", None, FIRST), ("ternary", None, FIRST)),
        *(("low_rank", {"micro_batch_size": 2}, CURRENT), ("vsa", None, CURRENT)),
    ],
)
def test_equals_the_compressed_loop_to_the_bit(
    name: str, accumulation: dict[str, Any] | None, numerics: int
) -> None:
    """Coded as a whole and bucket by bucket; the last batch of an epoch has 2 rows for 3 shards."""
    spec = compressed(CODECS[name], accumulation=accumulation)
    expected = compressed_loop(spec, ALLOWED, 3, 5, numerics=numerics)
    states = []
    for bucket_bytes in (BUCKET_BYTES, 1):
        trainer = trainer_of(spec, numerics=numerics)
        assert train(trainer, 5, bucket_bytes) == expected.losses
        assert_same_bits(model_of(trainer), dict(expected.state))
        states.append(trainer.copy_state()[0])
    assert_same_bits(*states)


@pytest.mark.parametrize("name", ["ternary", "low_rank"])
def test_residuals_follow_the_scale_of_the_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two good steps double it, until gradients overflow; a step that does is left out."""
    monkeypatch.setattr(precision, "_GROWTH_INTERVAL_STEPS", 2)
    execution = {"precision": "Mixed", "amp_dtype": "float16"}
    spec = compressed(CODECS[name], execution=execution, steps=20)
    trainer = trainer_of(spec)
    buckets = GradientBuckets(trainer.params, num_extras=trainer.num_extras)
    exchange = solo_exchange(buckets, 3, trainer.compressor)
    reports = [trainer.train_step(exchange, range(3), 3) for _ in range(20)]
    assert 0 < sum(report.num_skipped for report in reports) < 10
    expected = compressed_loop(spec, ALLOWED, 3)
    assert [report.loss for report in reports] == expected.losses
    assert_same_bits(model_of(trainer), dict(expected.state))


def test_a_state_with_residuals_is_in_the_order_in_which_those_of_several_members_are_joined() -> (
    None
):
    trainer = trainer_of(compressed(CODECS["ternary"]))
    train(trainer, 1)
    names = [*trainer.copy_state()[0]]
    assert trainer.is_sole_copy
    assert names == sorted(names)


class Recorder(SoloTransport):
    """Notes which buckets were handed over before what."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def launch(self, bucket: int) -> None:
        self.notes.append(f"launch {bucket}")


@pytest.mark.parametrize(
    ("name", "before"), [("ternary", ["launch 0", "launch 1", "launch 2"]), ("vsa", [])]
)
def test_coded_buckets_are_handed_over_during_backward(name: str, before: list[str]) -> None:
    """Those of the last shard; a codec of one payload waits for all of them."""
    trainer, recorder = trainer_of(compressed(CODECS[name])), Recorder()
    assert [each for each, _ in trainer.params] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    trainer.params[0][1].register_post_accumulate_grad_hook(  # ahead of the last bucket's
        lambda _: recorder.notes.append("end of backward")
    )
    num_extras = trainer.num_extras
    buckets = GradientBuckets(trainer.params, num_extras=num_extras, bucket_bytes=1)
    exchange = GradientReducer(buckets, ShardOwners(0, 1, 3), recorder, trainer.compressor)
    trainer.train_step(exchange, range(3), 3)
    ends = [place for place, note in enumerate(recorder.notes) if note == "end of backward"]
    assert len(ends) == 3
    launched = [note for note in recorder.notes[: ends[2]] if note != "end of backward"]
    assert launched == before
    assert recorder.notes[:2] == ["end of backward"] * 2
    assert [note for note in recorder.notes if note != "end of backward"] == [
        f"launch {bucket}" for bucket in range(5)
    ]


def test_codec_none_changes_nothing() -> None:
    spec = compressed({"codec": "none"})
    assert trainer_of(spec).compressor is None
    assert compressed_loop(spec, ALLOWED, 3, 5).losses == sharded_loop(spec, ALLOWED, 3, 5).losses


@pytest.mark.parametrize("name", ["int8", "ternary", "low_rank", "vsa"])
def test_a_resumed_run_takes_up_its_residuals(name: str) -> None:
    spec = compressed(CODECS[name])
    straight, first = trainer_of(spec), trainer_of(spec)
    train(straight, 7)
    train(first, 3)
    tensors, metadata = first.copy_state()
    kept = {key.partition("/")[0] for key in tensors} - {"model", "optimizer"}
    expected = {"int8": set(), "low_rank": {"residual", "basis"}}
    assert kept == expected.get(name, {"residual"})
    second = trainer_of(spec, fresh=False)
    second.load_state(tensors, metadata)
    train(second, 4)
    assert_same_bits(model_of(second), model_of(straight))
    assert_same_bits(second.copy_state()[0], straight.copy_state()[0])


def test_a_step_that_failed_leaves_no_residual() -> None:
    spec = compressed(CODECS["ternary"])
    straight, disturbed = trainer_of(spec), trainer_of(spec)
    train(straight, 4)
    train(disturbed, 2)
    buckets = GradientBuckets(disturbed.params, num_extras=disturbed.num_extras)
    exchange = solo_exchange(buckets, 3, disturbed.compressor)
    exchange.cut()
    with pytest.raises(Exception, match="cut"):
        disturbed.train_step(exchange, range(3), 3)
    train(disturbed, 2)
    assert_same_bits(disturbed.copy_state()[0], straight.copy_state()[0])


def test_each_member_keeps_the_residuals_of_its_own_shards_only() -> None:
    spec = compressed(CODECS["ternary"])
    trainer = trainer_of(spec)
    train(trainer, 2)
    tensors, metadata = trainer.copy_state()
    other = trainer_of(spec, fresh=False)
    other.load_state(tensors, metadata)
    assert other.compressor is not None
    other.compressor.begin_step(3, range(1, 3))
    alone, _ = other.copy_state(is_first=False)
    assert {name.split("/")[1] for name in alone} == {"shard1", "shard2"}
    with pytest.raises(RuntimeError, match="are of shards"):
        other.compressor.begin_step(3, range(2))


def test_gradients_that_are_not_finite_fail_the_step_by_name() -> None:
    trainer = trainer_of(compressed(CODECS["ternary"]))
    with torch.no_grad():
        trainer.params[0][1].fill_(float("nan"))
    with pytest.raises(UserCodeError, match=r"non-finite gradient of .* at step 1"):
        train(trainer, 1)


GOSSIP = {"method": "Decentralized", "topology": "ring"}
FEDERATED = {
    "type": "Federated",
    "num_clients": 2,
    "rounds": 1,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}


def data_parallel(**changes: Any) -> dict[str, Any]:
    aggregation = {"method": "AllReduce"}
    return {"type": "DataParallel", "num_replicas": 3, "aggregation": aggregation, **changes}


@pytest.mark.parametrize(
    ("codec", "changes", "message"),
    [
        ({}, {"execution": {"precision": "Full"}}, "compression.codec: int8 codes float32"),
        ({}, {"strategy": {"type": "Local"}}, "Local exchanges neither gradients nor updates"),
        (
            {},
            {"strategy": data_parallel(options={"all_reduce": "ring"})},
            "ring sends sums, not what a codec makes of a shard",
        ),
        (
            {},
            {"strategy": {**FEDERATED, "options": {"inner": data_parallel()}}, "steps": None},
            "is not possible around DataParallel/AllReduce",
        ),
        (
            {"error_feedback": True},
            {"strategy": FEDERATED, "steps": None},
            "clients keep nothing from round to round",
        ),
        (
            {"error_feedback": True},
            {"strategy": data_parallel(aggregation=GOSSIP)},
            "differences to public copies are one already",
        ),
        (
            {"codec": "ternary", "stochastic": True},
            {"strategy": data_parallel(aggregation=GOSSIP)},
            "the public copies would drift away",
        ),
        ({"consensus_step_size": 0.5}, {"strategy": data_parallel()}, "belongs to Decentralized"),
    ],
)
def test_what_no_engine_honours_is_refused(
    codec: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        job(
            "mlp",
            compression={"codec": "int8", **codec},
            **{"strategy": data_parallel(), **changes},
        )


@pytest.mark.parametrize(("bucket_bytes", "what"), [(1, "nan"), (BUCKET_BYTES, "nan gradient")])
def test_a_skipped_step_leaves_no_residual(what: str, bucket_bytes: int) -> None:
    told: dict[str, Any] = user_model("acting_models:Told", at=5, what=what)
    accumulation = {"non_finite": "skip_step"}
    spec = compressed(CODECS["ternary"], accumulation=accumulation)
    trainer = trainer_of(with_fields(spec, {"model": told}))
    num_extras = trainer.num_extras
    buckets = GradientBuckets(trainer.params, num_extras=num_extras, bucket_bytes=bucket_bytes)
    exchange = solo_exchange(buckets, 3, trainer.compressor)
    trainer.train_step(exchange, range(3), 3)
    before = trainer.copy_state()[0]
    report = trainer.train_step(exchange, range(3), 3)
    assert (report.num_skipped, report.step) == (1, 2)
    assert_same_bits(trainer.copy_state()[0], before)
    assert trainer.train_step(exchange, range(3), 3).num_skipped == 0


@pytest.mark.parametrize("name", ["ternary", "low_rank"])
def test_nodes_take_up_their_public_copies(name: str) -> None:
    spec = gossip_job("dropout_mlp", 3, compression=CODECS[name])
    straight, exchange = gossip_trainer(spec)
    first, other_exchange = gossip_trainer(spec)
    for _ in range(6):
        straight.train_step(exchange, range(3), 3)
    for _ in range(2):
        first.train_step(other_exchange, range(3), 3)
    tensors, metadata = first.copy_state(is_first=True)
    second, last_exchange = gossip_trainer(spec)
    second.load_state(tensors, metadata)
    for _ in range(4):
        second.train_step(last_exchange, range(3), 3)
    expected = straight.copy_state(is_first=False)[0]
    assert_same_bits(second.copy_state(is_first=False)[0], expected)
    num_params = sum(1 for name in tensors if name.startswith("node0/model/"))
    assert sum(1 for name in tensors if name.startswith("node0/public/")) == num_params


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@settings(max_examples=20, deadline=None)
@given(weight=st.integers(1, 5000), sizes=st.lists(st.sampled_from([0, 1, 7, 40]), min_size=1))
def test_a_mean_gradient_that_the_codec_can_say_is_kept_to_the_bit(
    codec: str, weight: int, sizes: list[int]
) -> None:
    generator = torch.Generator().manual_seed(weight)
    narrow = {"fp16": torch.float16, "bf16": torch.bfloat16}[codec]
    means = [torch.randn(size, generator=generator).to(narrow).float() for size in sizes]
    params = [(str(place), nn.Parameter(torch.zeros(size))) for place, size in enumerate(sizes)]
    coded = Compressor(CompressionSpec.parse(codec), params, num_extras=1, seed=3)
    layout = GradientBuckets(params, num_extras=1).layout
    coded.begin_step(1, range(1))
    coded.weigh(0, float(weight))
    gradients = [mean * weight for mean in means]
    for portion in coded.portions(layout):
        coded.code(0, portion, gradients)
    assert all(torch.equal(g / weight, mean) for g, mean in zip(gradients, means, strict=True))
    coded.end(0, torch.tensor([weight], dtype=torch.float64))
    for adds in (False, True):
        said = [torch.zeros_like(mean) for mean in means]
        pieces = coded.cut(coded.message(0), coded.portions(layout))
        for portion, piece in zip(coded.portions(layout), pieces, strict=True):
            own = said[portion.places.start : portion.places.stop]
            coded.decode(0, portion, piece, own, adds=adds)
        assert all(map(torch.equal, said, gradients))


def test_a_shard_without_counted_rows_says_nothing() -> None:
    params = [("w", nn.Parameter(torch.zeros(40)))]
    coded = Compressor(CompressionSpec.parse("ternary"), params, num_extras=1, seed=3)
    (portion,) = coded.portions(GradientBuckets(params, num_extras=1).layout)
    coded.begin_step(1, range(1))
    coded.weigh(0, 0.0)
    gradient = torch.zeros(40)
    coded.code(0, portion, [gradient])
    coded.end(0, torch.zeros(1, dtype=torch.float64))
    coded.decode(0, portion, coded.message(0), [gradient], adds=True)
    assert not gradient.any()


def test_tensors_are_coded_by_their_sums_only_where_all_of_these_are_finite() -> None:
    assert finite_totals(["a", "b"], [torch.tensor([-1.0, 2.0]), torch.zeros(3)]) == [3.0, 0.0]
    with pytest.raises(NonFiniteError, match="b"):
        finite_totals(["a", "b"], [torch.ones(3), torch.tensor([1.0, torch.inf])])
    assert finite_totals([], []) == []


def test_messages_are_coded_only_where_they_are_fewer_bytes_than_partial_sums() -> None:
    """All shards of one member become one sum, and each has a message."""
    params = [("p", nn.Parameter(torch.zeros(16)))]
    coded = Compressor(CompressionSpec.parse("ternary"), params, num_extras=1, seed=3)
    assert (coded.message_bytes, coded.raw_bytes) == (16, 72)
    freight = CodedFreight(GradientBuckets(params, num_extras=1), coded, rank=0)
    assert freight.pays_off(plan_step(ShardOwners(0, 1, 4), 4))
    assert not freight.pays_off(plan_step(ShardOwners(0, 1, 8), 8))
