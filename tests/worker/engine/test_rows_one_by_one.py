"""Training on data sets whose rows are fetched one by one, against the reference loops."""

from typing import Any

import pytest
import torch

from stratagem.coordinator.effects.synchronous.evaluation_sums import fold_parts
from stratagem.worker.engine import build_inference
from stratagem.worker.plans.train_plan import parts_to_proto
from tests.every_pair import every_value
from tests.jobs import job
from tests.reference.evaluation_loop import evaluation_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop
from tests.worker.engine.client_rounds import federated, run
from tests.worker.engine.gossip_nodes import gossip_job, trainer
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_same_bits,
    evaluating,
    model_of,
    train,
    trainer_of,
)

ROWS = {"entrypoint": "tests.userland.data:noisy_rows"}
COLLATED = {**ROWS, "collate": "tests.userland.data:noisy_batch"}
OF_BATCH = "tests.userland.losses:loss_of_batch"
CASES: dict[str, dict[str, Any]] = {
    "rows": {"data": ROWS},
    "pooled": {"data": ROWS, "execution": {"memory": "Pooled"}},
    "collated": {"data": COLLATED, "loss": OF_BATCH},
    "micro-batches": {
        "data": COLLATED,
        "loss": OF_BATCH,
        "accumulation": {"micro_batch_size": 3},
    },
}


@pytest.mark.parametrize(
    ("case", "num_shards"), [*every_value(list(CASES), [1, 3]), ("rows", 3), ("micro-batches", 2)]
)
def test_equals_the_sharded_loop_to_the_bit(case: str, num_shards: int) -> None:
    spec = job("FunctionalDropout", **CASES[case])
    made = trainer_of(spec)
    losses = train(made, num_shards, 10)
    expected = sharded_loop(spec, ALLOWED, num_shards)
    assert losses == expected.losses
    assert_same_bits(model_of(made), dict(expected.state))


def test_a_run_that_is_resumed_in_the_middle_of_an_epoch_equals_the_undisturbed_one() -> None:
    spec = job("FunctionalDropout", **CASES["micro-batches"])
    straight = trainer_of(spec)
    train(straight, 3, 10)
    first = trainer_of(spec)
    train(first, 3, 5)  # of four steps per epoch
    second = trainer_of(spec, fresh=False)
    second.load_state(*first.copy_state())
    torch.rand(3)  # what others draw between is of no matter
    train(second, 3, 5)
    assert second.fingerprint() == straight.fingerprint()


@pytest.mark.parametrize("case", ["rows", "micro-batches"])
def test_federated_clients_equal_the_loop(case: str) -> None:
    spec = federated("FunctionalDropout", local_epochs=2, **CASES[case])
    state, losses = run(spec)
    expected = federated_loop(spec, ALLOWED)
    assert_same_bits(state, dict(expected.state))
    assert losses == expected.losses


def test_gossip_nodes_equal_the_loop() -> None:
    spec = gossip_job("FunctionalDropout", 3, **CASES["micro-batches"])
    made, exchange = trainer(spec)
    losses = [made.train_step(exchange, range(3), 3).loss for _ in range(6)]
    assert losses == gossip_loop(spec, ALLOWED, 6).losses


@pytest.mark.parametrize("case", ["rows", "collated"])
def test_an_evaluation_equals_the_loop(case: str) -> None:
    metrics = {"rows": ("accuracy",), "collated": ()}[case]  # its target is a whole batch
    spec = evaluating("FunctionalDropout", **CASES[case])
    spec = spec.model_copy(
        update={"evaluation": spec.evaluation.model_copy(update={"metrics": metrics})}
    )
    made = build_inference(spec, ALLOWED, device=CPU, fresh=True)
    batches = made.evaluator.share(["test"], 0, 1)
    parts = parts_to_proto([made.part(*batch) for batch in reversed(batches)])
    assert fold_parts(parts, spec.evaluation.metrics) == evaluation_loop(spec, ALLOWED)
