"""The estimate of a worker whose replicas take local steps, against peaks of real steps."""

import tracemalloc
from typing import Any

import pytest

from stratagem.common.job import JobSpec, exchanged_codec
from stratagem.tools.memory.estimate import text_of
from stratagem.tools.memory.play import measure_training
from stratagem.tools.memory.strategies import outer_messages
from stratagem.worker.exchange.layout import ShardOwners
from tests.tools.memory.support import SITE, estimate, kind_job, replicas
from tests.worker.engine.local_replicas import local_steps_job
from tests.worker.engine.local_replicas import trainer as replicas_trainer

WIDE = {"entrypoint": "tests.userland.models:mlp", "kwargs": {"hidden": 4_000}}


def apart(number: int, **options: Any) -> JobSpec:
    aggregation = {"method": options.pop("method", "AllReduce")}
    strategy = {**replicas(number, local_steps=20, **options), "aggregation": aggregation}
    return kind_job("mlp", kwargs={"depth": 4}, strategy=strategy, batch_size=7, checkpoint=None)


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.sweep),
        (3, {"outer": {"name": "mean"}}),
        (2, {"fragments": 2, "overlap_steps": 5, "mix": 0.25}),
    ],
)
def test_replicas_with_local_steps_are_measured_the_same(num_workers: int, options: Any) -> None:
    spec = apart(3, **options)
    measured = measure_training(spec, SITE, ShardOwners(0, num_workers, 3))
    assert estimate(spec, num_workers=num_workers).total == pytest.approx(measured, rel=0.02)


@pytest.mark.sweep
def test_local_steps_keep_models_optimizers_and_what_joins_them() -> None:
    """Adam: 8 bytes of moments of each parameter of a replica, 4 of outer momentum."""
    found = estimate(apart(3), num_workers=2)  # the first worker has two of three replicas
    one = 4 * found.num_parameters
    assert found.parameters == 3 * one
    assert found.optimizer == pytest.approx(2 * 2 * one + one, rel=0.01)
    # A gradient of each replica, two sets of outer ones, and one that is received.
    assert found.gradients == pytest.approx(5 * one, rel=0.02)
    assert found.snapshot == pytest.approx(found.optimizer + one, rel=0.01)
    assert found.notes == (
        "2 of 3 replicas, each with parameters, gradients and an optimizer of its own; "
        f"{text_of(one)} of parameters that they have in common, {text_of(one)} of outer momentum, "
        f"{text_of(found.gradients - 2 * one)} of outer gradients, with room for what is received",
    )
    mean = estimate(apart(3, outer={"name": "mean"}), num_workers=2)
    assert found.optimizer - mean.optimizer == one
    assert "momentum" not in mean.notes[0]


@pytest.mark.sweep
def test_a_commit_of_fragments_has_the_replicas_and_what_is_under_way() -> None:
    plain = estimate(apart(3), num_workers=3)
    kept = estimate(apart(3, mix=0.5), num_workers=3)
    assert kept.snapshot - plain.snapshot == 4 * plain.num_parameters
    overlapped = estimate(apart(3, fragments=2, overlap_steps=1), num_workers=3)
    under_way = overlapped.snapshot - kept.snapshot
    assert 0.4 * 4 * plain.num_parameters < under_way < 0.6 * 4 * plain.num_parameters
    assert "of outer gradients of 2 fragments" in overlapped.notes[0]
    server, direct = (
        estimate(apart(3, method=method), num_workers=3)
        for method in ("ParameterServer", "AllReduce")
    )
    assert server.gradients - direct.gradients == 4 * direct.num_parameters
    found = estimate(apart(2), measure=True)
    assert found.total == found.measured


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.sweep)])
def test_outer_gradients_in_few_bits_are_in_it(bits: int) -> None:
    """Against the peak of what numpy holds in a second round of two replicas on one worker."""
    spec = local_steps_job(WIDE, 2, 1, options={"outer_bits": bits})
    tracemalloc.start()
    trainer, exchange = replicas_trainer(spec)
    trainer.train_step(exchange, range(2), 2)
    tracemalloc.reset_peak()
    start = tracemalloc.get_traced_memory()[0]
    trainer.train_step(exchange, range(2), 2)
    measured = tracemalloc.get_traced_memory()[1] - start
    tracemalloc.stop()
    found = estimate(spec, num_workers=1)
    codec = exchanged_codec(None, spec.strategy)
    assert codec is not None
    need = outer_messages(codec, found.layout, 1, 2)
    assert need.messages + need.moment == pytest.approx(measured, rel=0.25)
    assert found.notes[1] == f"{text_of(need.messages)} of outer gradients as {codec.codec}"
    plain = estimate(local_steps_job(WIDE, 2, 1), num_workers=1)
    assert found.gradients == plain.gradients
    assert found.workspace > plain.workspace
    overlapped = {"fragments": 2, "overlap_steps": 1, "outer_bits": bits}
    held = estimate(local_steps_job(WIDE, 2, 2, options=overlapped), num_workers=1)
    sums = estimate(
        local_steps_job(WIDE, 2, 2, options={**overlapped, "outer_bits": None}), num_workers=1
    )
    assert held.gradients - sums.gradients == outer_messages(codec, held.layout, 2, 2).messages
