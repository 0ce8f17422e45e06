"""Client rounds against the federated reference loop."""

import re
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.worker.engine import ClientRunner, run_client_round
from tests.gan_jobs import TURNS, gan
from tests.jobs import job, user_model
from tests.reference.client_turns import federated_turns_loop
from tests.reference.loops import federated_loop, plain_loop
from tests.worker.engine.client_rounds import federated, run
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits, trainer_of


@pytest.mark.parametrize(
    "spec",
    [
        federated(),
        federated("dropout_mlp", local_epochs=2),
        federated("everything", aggregation={"method": "FedProx", "mu": 0.3}),
        federated("batch_norm_mlp", batch_size=25, partition={"method": "contiguous"}),
        federated("mlp", partition={"method": "dirichlet", "alpha": 0.5}),
        federated("mlp", data={"entrypoint": "tests.userland.data:per_client"}),
        federated("mlp", optimizer={"name": "sgd", "lr": 0.1, "schedule": {"name": "cosine"}}),
    ],
    ids=["plain", "dropout", "prox", "batch norm", "dirichlet", "per client", "schedule"],
)
def test_equals_the_federated_loop_to_the_bit(spec: Any) -> None:
    state, losses = run(spec)
    expected = federated_loop(spec, ALLOWED)
    assert_same_bits(state, dict(expected.state))
    assert losses == expected.losses


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
    again = run_client_round(spec, ALLOWED, base, 1, 3, 2, CPU)
    assert_same_bits(dict(again.tensors), dict(first.tensors))
    assert (again.num_samples, again.num_steps, again.loss) == (17, 2, first.loss)
    other_round = runner.run(base, 1, 3, 3)
    assert any(not torch.equal(first.tensors[n], t) for n, t in other_round.tensors.items())


def test_client_without_rows_is_refused_by_name() -> None:
    spec = federated(data={"entrypoint": "tests.userland.data:empty_for_client_1"})
    base, _ = trainer_of(spec).copy_state()
    with pytest.raises(InvalidInputError, match="client 1 of 3 has no rows"):
        run_client_round(spec, ALLOWED, base, 1, 3, 1, CPU)


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
        run_client_round(spec, ALLOWED, base, 2, 3, 1, CPU)
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
