"""Orders of the training rows against the reference loop, and what is refused."""

from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import entry_points
from stratagem.worker.data import order as row_order
from tests.jobs import job
from tests.reference.loops import sharded_loop
from tests.reference.row_batches import epoch_batches
from tests.worker.engine.client_rounds import federated
from tests.worker.engine.support import ALLOWED, assert_same_bits, model_of, train, trainer_of

HERE = "tests.userland.orders:"
DATA = "tests.userland.data:"
WEIGHTED = {"by": "weighted", "weights": f"{HERE}row_weights", "num_rows": 60}
ORDERS: dict[str, Any] = {
    "shuffle": "shuffle",
    "sequential": "sequential",
    "weighted": WEIGHTED,
    "bucketed": {"by": "bucketed", "lengths": f"{HERE}row_lengths", "window": 2},
    "batches": f"{HERE}row_batches",
}


def ordered(order: Any, data: str = "noisy_rows", **changes: Any) -> Any:
    return job(data={"entrypoint": f"{DATA}{data}", "order": order}, **changes)


@pytest.mark.parametrize(
    ("order", "data"), [*((order, "noisy_rows") for order in ORDERS), ("weighted", "classes")]
)
def test_an_order_equals_the_reference_loop_to_the_bit(order: str, data: str) -> None:
    spec = ordered(ORDERS[order], data, steps=9)
    made = trainer_of(spec)
    losses = train(made, 2, 5)
    again = trainer_of(spec, fresh=False)  # resumed in the middle of an epoch
    again.load_state(*made.copy_state())
    losses += train(again, 2, 4)
    expected = sharded_loop(spec, ALLOWED, 2)
    assert losses == expected.losses
    assert_same_bits(model_of(again), dict(expected.state))


def test_epochs_are_as_long_as_the_order_and_a_shuffle_may_be_named() -> None:
    for order, steps in ((WEIGHTED, 4), (f"{HERE}row_batches", 3), ("sequential", 4)):
        assert trainer_of(ordered(order, steps=None, epochs=2)).num_steps == 2 * steps
    named, silent = ordered("shuffle"), job(data={"entrypoint": f"{DATA}noisy_rows"})
    assert train(trainer_of(named), 2, 5) == train(trainer_of(silent), 2, 5)


def test_a_row_that_comes_again_draws_anew_and_a_sampler_of_torch_is_an_order() -> None:
    spec = ordered(WEIGHTED)
    made, sampled = trainer_of(spec), trainer_of(ordered(f"{HERE}sampled"))
    rows = torch.cat(epoch_batches(spec, ALLOWED, made.setup.data["train"], 0))
    assert (rows >= 50).any(), "some row came twice"
    assert len(rows.unique()) == len(rows)
    of_step = [made.setup.batch_order().batch(step)[1] for step in range(4)]
    assert torch.equal(torch.cat(of_step), rows)
    first, second = (
        torch.cat([sampled.setup.batch_order().batch(step)[1] for step in steps])
        for steps in (range(4), range(4, 8))
    )
    assert sorted(first.tolist()) == list(range(50))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (f"{HERE}fewer_batches", r"data\.order: gives 2 batches for epoch 1 and 3 for epoch 0"),
        (f"{HERE}wrong_rows", r"names rows that are not in 0\.\.49"),
        (f"{HERE}large_batches", r"batches of 1 to 17 rows; 1 to batch_size \(16\)"),
        (f"{HERE}impure_order", r"another order for epoch 0 when it is asked again"),
        (f"{HERE}distributed", r"DistributedSampler"),
    ],
)
def test_orders_that_cannot_be_used_are_refused(order: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        train(trainer_of(ordered(order)), 1, 4)


def test_weights_must_fit_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"by": "weighted", "weights": f"{HERE}two_weights"}
    with pytest.raises(InvalidInputError, match=r"data\.order\.weights: must .* 50 rows.*gave 2"):
        trainer_of(ordered(order))
    monkeypatch.setattr(row_order, "MAX_WEIGHTED_ROWS", 49)
    with pytest.raises(InvalidInputError, match=r"data\.order\.by: weighted takes at most 49"):
        trainer_of(ordered(WEIGHTED))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, "needs exactly one of by, entrypoint"),
        ("random", r"data\.order\.by"),
        ({"by": "weighted"}, r"data\.order\.weights: missing; by: weighted needs it"),
        ({"by": "shuffle", "window": 3}, r"data\.order\.window: .*only with by: bucketed"),
    ],
)
def test_what_does_not_go_together_is_refused_at_submit(order: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ordered(order)


def test_federated_clients_shuffle() -> None:
    data = {"entrypoint": f"{DATA}noisy_rows", "order": "sequential"}
    with pytest.raises(InvalidInputError, match=r"data\.order: .*strategy Federated"):
        federated(data=data)
    assert federated(data={**data, "order": "shuffle"})
    for order, name in ((WEIGHTED, "row_weights"), (f"{HERE}row_batches", "row_batches")):
        assert f"{HERE}{name}" in entry_points(ordered(order))
