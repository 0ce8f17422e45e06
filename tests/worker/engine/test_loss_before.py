"""The loss of a global state over a client's rows, before the client trains them."""

from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.engine import ClientRunner
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.models.model_builder import build_model
from tests.reference.weighing import loss_before
from tests.worker.engine.client_rounds import federated
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits, trainer_of

PER_CLIENT: dict[str, Any] = {"data": {"entrypoint": "tests.userland.data:per_client"}}


def measured(spec: Any, client: int = 1) -> float:
    base, _ = trainer_of(spec).copy_state()
    return ClientRunner(spec, ALLOWED, CPU).loss_before(base, client, 3)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("model", ["mlp", "dropout_mlp", "batch_norm_mlp"])
def test_it_is_that_of_a_plain_evaluation(model: str, batch_size: int) -> None:
    spec = federated(model, batch_size=batch_size, **PER_CLIENT)
    built = build_model(spec, ALLOWED, device=CPU, fresh=True)
    expected = loss_before(spec, ALLOWED, built, KeyedRandomness(built, CPU), 1)
    assert measured(spec) == expected
    assert measured(spec, client=0) != expected


def test_measuring_changes_nothing_of_the_round() -> None:
    spec = federated("batch_norm_mlp", **PER_CLIENT)
    base, _ = trainer_of(spec).copy_state()
    plain = ClientRunner(spec, ALLOWED, CPU).run(base, 1, 3, 2)
    runner = ClientRunner(spec, ALLOWED, CPU)
    first = runner.loss_before(base, 1, 3)
    after = runner.run(base, 1, 3, 2)
    assert_same_bits(dict(after.tensors), dict(plain.tensors))
    assert runner.loss_before(base, 1, 3) == first


def test_a_model_that_is_lost_has_a_loss_that_says_so() -> None:
    spec = federated(**PER_CLIENT)
    base, _ = trainer_of(spec).copy_state()
    lost = {name: torch.full_like(tensor, torch.nan) for name, tensor in base.items()}
    assert not ClientRunner(spec, ALLOWED, CPU).loss_before(lost, 1, 3) < torch.inf


def test_each_batch_may_end_it() -> None:
    spec = federated(batch_size=5, **PER_CLIENT)
    base, _ = trainer_of(spec).copy_state()
    calls: list[int] = []
    ClientRunner(spec, ALLOWED, CPU).loss_before(base, 1, 3, lambda: calls.append(1))
    assert len(calls) > 1

    def ended() -> None:
        raise RuntimeError("ended")

    with pytest.raises(RuntimeError, match="ended"):
        ClientRunner(spec, ALLOWED, CPU).loss_before(base, 1, 3, ended)


def test_a_stream_of_rows_and_a_client_without_rows_are_refused() -> None:
    streams = federated(data={"entrypoint": "tests.userland.streams:own_shards"})
    base, _ = trainer_of(federated()).copy_state()
    with pytest.raises(InvalidInputError, match=r"strategy\.options\.q: needs training rows"):
        ClientRunner(streams, ALLOWED, CPU).loss_before(base, 1, 3)
    empty = federated(data={"entrypoint": "tests.userland.data:empty_for_client_1"})
    with pytest.raises(InvalidInputError, match="client 1 of 3 has no rows"):
        ClientRunner(empty, ALLOWED, CPU).loss_before(base, 1, 3)
