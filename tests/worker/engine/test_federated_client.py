"""Client rounds against the federated reference loop, and the loss before a client trains."""

import re
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.worker.federated.client_trainer import ClientRunner
from stratagem.worker.models.build import build_model
from stratagem.worker.numerics.randomness import KeyedRandomness
from tests.every_pair import every_value
from tests.gan_jobs import TURNS, gan
from tests.jobs import job, user_data, user_model
from tests.reference.client_turns import federated_turns_loop
from tests.reference.loops import plain_loop
from tests.reference.weighing import loss_before
from tests.worker.engine.client_rounds import assert_clients_equal_loop, federated, run
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits, trainer_of


@pytest.mark.parametrize(
    "spec",
    [
        federated(),
        federated("dropout_mlp", local_epochs=2),
        federated("everything", aggregation={"method": "FedProx", "mu": 0.3}),
        federated("batch_norm_mlp", batch_size=25, partition={"method": "contiguous"}),
        federated("mlp", partition={"method": "dirichlet", "alpha": 0.5}),
        federated("mlp", data=user_data("per_client")),
        federated("mlp", optimizer={"name": "sgd", "lr": 0.1, "schedule": {"name": "cosine"}}),
    ],
    ids=["plain", "dropout", "prox", "batch norm", "dirichlet", "per client", "schedule"],
)
def test_equals_the_federated_loop_to_the_bit(spec: Any) -> None:
    assert_clients_equal_loop(spec)


def test_one_client_with_all_data_is_the_plain_loop() -> None:
    optimizer = {"name": "sgd", "lr": 0.1}
    state, _ = run(federated(num_clients=1, optimizer=optimizer))
    expected = plain_loop(job(optimizer=optimizer, steps=None, epochs=3), ALLOWED)
    assert_same_bits(state, dict(expected.state))


def test_prox_without_pull_is_fedavg() -> None:
    plain = run(federated("dropout_mlp"))
    prox = run(federated("dropout_mlp", aggregation={"method": "FedProx", "mu": 0.0}))
    assert_same_bits(plain[0], prox[0])


def test_a_round_done_again_gives_the_same_update() -> None:
    spec = federated("dropout_mlp")
    base, _ = trainer_of(spec).copy_state()
    runner = ClientRunner(spec, ALLOWED, CPU)
    first = runner.run(base, 1, 3, 2)
    runner.run(base, 0, 3, 2)
    assert_same_bits(dict(runner.run(base, 1, 3, 2).tensors), dict(first.tensors))
    again = ClientRunner(spec, ALLOWED, CPU).run(base, 1, 3, 2)
    assert_same_bits(dict(again.tensors), dict(first.tensors))
    assert (again.num_samples, again.num_steps, again.loss) == (17, 2, first.loss)
    other_round = runner.run(base, 1, 3, 3)
    assert any(not torch.equal(first.tensors[n], t) for n, t in other_round.tensors.items())


def test_client_without_rows_is_refused_by_name() -> None:
    spec = federated(data=user_data("empty_for_client_1"))
    base, _ = trainer_of(spec).copy_state()
    with pytest.raises(InvalidInputError, match="client 1 of 3 has no rows"):
        ClientRunner(spec, ALLOWED, CPU).run(base, 1, 3, 1)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, "optimizer.lr"),
        (
            {"server_optimizer": {"name": "fedadam"}},
            "optimizer.lr (from round 2 on perhaps "
            "strategy.options.server_optimizer.learning_rate)",
        ),
    ],
)
def test_non_finite_loss_of_a_client(options: dict[str, Any], rates: str) -> None:
    exploding = user_model("acting_models:Exploding", at_call=3)
    spec = federated(exploding, local_epochs=3, options=options)
    base, _ = trainer_of(spec).copy_state()
    told = f"non-finite loss; lower {re.escape(rates)}, or look at the data "
    with pytest.raises(UserCodeError, match=told) as caught:
        ClientRunner(spec, ALLOWED, CPU).run(base, 2, 3, 1)
    assert caught.value.activity == "round 1, client 2, step 3"


def test_state_that_does_not_fit_is_refused() -> None:
    spec = federated()
    base, _ = trainer_of(spec).copy_state()
    runner = ClientRunner(spec, ALLOWED, CPU)
    missing = {name: t for name, t in base.items() if name != "model/0.bias"}
    with pytest.raises(InvalidInputError, match=r"missing tensors: \['0.bias'\]"):
        runner.run(missing, 0, 3, 1)
    with pytest.raises(InvalidInputError, match=r"state\.0\.bias: is torch\.float64"):
        runner.run({**base, "model/0.bias": base["model/0.bias"].double()}, 0, 3, 1)
    with pytest.raises(InvalidInputError, match="Federated"):
        ClientRunner(job(), ALLOWED, CPU)


def gan_clients(num_rounds: int = 3, **changes: Any) -> Any:
    sections = gan(**changes)
    model = sections.pop("model")
    return federated(model, rounds=num_rounds, **sections)


@pytest.mark.parametrize(
    "spec",
    [
        gan_clients(local_epochs=2),
        gan_clients(aggregation={"method": "FedProx", "mu": 0.3}, accumulation={"steps": 2}),
    ],
    ids=["plain", "prox"],
)
def test_clients_take_turns(spec: Any) -> None:
    state, losses = run(spec)
    expected = federated_turns_loop(spec, ALLOWED)
    assert_same_bits(state, dict(expected.state))
    assert losses == expected.losses
    base, _ = trainer_of(spec).copy_state()
    runner = ClientRunner(spec, ALLOWED, CPU)
    first = runner.run(base, 1, 3, 1)
    assert first.metrics.keys() >= {"loss.d", "loss.g", "real.d", "max_grad_norm"}
    assert first.loss == pytest.approx(first.metrics["loss.d"] + first.metrics["loss.g"])
    assert_same_bits(dict(runner.run(base, 1, 3, 1).tensors), dict(first.tensors))


def test_a_turn_of_a_client_that_is_skipped_leaves_the_step_out_of_its_sums() -> None:
    turns = [{**TURNS[0], "step": "tests.userland.gans:infinite_disc"}, TURNS[1]]
    spec = gan_clients(turns=turns, accumulation={"non_finite": "skip_step"})
    base, _ = trainer_of(spec).copy_state()
    update = ClientRunner(spec, ALLOWED, CPU).run(base, 1, 3, 1)
    assert update.metrics["skipped_steps"] == update.num_steps == 1
    assert update.loss == 0.0
    for name, tensor in update.tensors.items():
        if tensor.dim() == 2:
            assert torch.equal(tensor, base[name]) == name.startswith("model/disc.")


PER_CLIENT: dict[str, Any] = {"data": user_data("per_client")}


def measured(spec: Any, client: int = 1) -> float:
    base, _ = trainer_of(spec).copy_state()
    return ClientRunner(spec, ALLOWED, CPU).loss_before(base, client, 3)


@pytest.mark.parametrize(
    ("model", "batch_size"), every_value(["mlp", "dropout_mlp", "batch_norm_mlp"], [1, 7, 64])
)
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
    empty = federated(data=user_data("empty_for_client_1"))
    with pytest.raises(InvalidInputError, match="client 1 of 3 has no rows"):
        ClientRunner(empty, ALLOWED, CPU).loss_before(base, 1, 3)
