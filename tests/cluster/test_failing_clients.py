"""Clients of a federation that fail, on real processes: each is left out alone, with the reason."""

import re
from collections.abc import Callable
from math import isclose
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import RunFailedError, UserCodeError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    Outcome,
    assert_same_bits,
    federated,
    outcome_of,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.reference.loops import federated_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("a client that fails is left out alone, with the reason"),
]

CLIENT = 2
"""Fails."""


def failing(folder: Path, how: str, in_rounds: list[int], **changes: Any) -> JobSpec:
    """Three rounds of four clients, of which one fails in some; each takes one batch a round."""
    data = user_data(
        "failing_clients", folder=str(folder), how=how, failing=[CLIENT], rounds=in_rounds
    )
    return federated(**{"data": data, "batch_size": 64, **changes})


def sound(folder: Path, **changes: Any) -> JobSpec:
    """The same rows, and nobody fails."""
    data = user_data("failing_clients", folder=str(folder))
    return federated(**{"data": data, "batch_size": 64, **changes})


def without(rounds: list[int], num_clients: int = 4) -> Callable[[int], list[int]]:
    """The clients of a round, when one of them fails in some."""
    return lambda number: [c for c in range(num_clients) if c != CLIENT or number not in rounds]


def rejections(outcome: Outcome) -> list[tuple[int, int, str]]:
    payloads = [event.payload for event in outcome.of("UpdateRejected")]
    return [(each["round_num"], each["client"], each["cause"]) for each in payloads]


@pytest.mark.parametrize(
    ("how", "cause", "said", "rounds"),
    [
        ("raise", "exception", "KeyError: 'label'", [2, 3]),
        pytest.param("memory", "memory", "MemoryError: ", [1], marks=pytest.mark.sweep),
        pytest.param("torch memory", "memory", "RuntimeError: ", [2, 3], marks=pytest.mark.sweep),
        pytest.param(
            "not finite", "not_finite_loss", "non-finite loss", [1], marks=pytest.mark.sweep
        ),
    ],
    ids=["raise", "memory", "torch memory", "not finite"],
)
def test_a_client_that_fails_is_left_out_of_its_rounds_alone(
    client: Client, tmp_path: Path, how: str, cause: str, said: str, rounds: list[int]
) -> None:
    outcome = train(client, failing(tmp_path, how, rounds))
    assert rejections(outcome) == [(number, CLIENT, cause) for number in rounds]
    for event in outcome.of("UpdateRejected"):
        text = f"round {event.payload['round_num']}: the update of client {CLIENT} is rejected: "
        assert event.sentence.startswith(text + said.strip())
    expected = federated_loop(sound(tmp_path), ALLOWED, without(rounds))
    assert_same_bits(outcome.state, expected.state)
    assert isclose(outcome.status.metrics["train.loss"], expected.losses[-1], rel_tol=1e-12)
    count = f"client {CLIENT} in {len(rounds)} round{'s' if len(rounds) > 1 else ''}"
    assert outcome.status.reason.startswith(f"3 rounds committed; rejected: {count} ({said[:8]}")
    assert outcome.status.reproducible == (cause != "memory")


@pytest.mark.sweep
def test_a_client_that_ends_its_processes_is_left_out_alone(
    client: Client, exact_cluster: LocalCluster, tmp_path: Path
) -> None:
    rounds = [2]
    run = client.submit(failing(tmp_path, "exit", rounds, rounds=max(rounds)))
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert rejections(outcome) == [(number, CLIENT, "crashed") for number in rounds]
    (event,) = outcome.of("UpdateRejected")
    assert "has ended 3 worker processes" in event.payload["reason"]
    assert "with exit status 3" in event.payload["reason"]
    assert not outcome.status.reproducible
    expected = federated_loop(sound(tmp_path, rounds=max(rounds)), ALLOWED, without(rounds))
    assert_same_bits(outcome.state, expected.state)


@pytest.mark.sweep
def test_a_client_that_skips_every_step_does_not_vote_with_the_old_state(
    client: Client, tmp_path: Path
) -> None:
    skipping = {"accumulation": {"non_finite": "skip_step"}, "options": {"local_epochs": 1}}
    outcome = train(client, failing(tmp_path, "not finite", [1, 3], **skipping))
    assert rejections(outcome) == [(1, CLIENT, "not_finite"), (3, CLIENT, "not_finite")]
    assert "all of its 1 steps were left out" in outcome.of("UpdateRejected")[0].payload["reason"]
    expected = federated_loop(sound(tmp_path, **skipping), ALLOWED, without([1, 3]))
    assert_same_bits(outcome.state, expected.state)
    assert outcome.status.reproducible


@pytest.mark.sweep
def test_when_all_fail_the_run_fails_with_what_they_raised(client: Client, tmp_path: Path) -> None:
    data = user_data("failing_clients", folder=str(tmp_path), failing=[0, 1, 2], rounds=[1])
    run = client.submit(federated(data=data, batch_size=64, num_clients=3))
    with pytest.raises(UserCodeError) as raised:
        run.result()
    assert (raised.value.type, raised.value.message) == ("KeyError", "'label'")
    assert 'raise KeyError("label")' in raised.value.traceback
    assert run.status().reason == (
        "round 1: 0 of 3 updates; 3 raised KeyError: 'label' (clients 0, 1, 2)"
    )


@pytest.mark.sweep
def test_a_killed_coordinator_goes_on_without_the_client_that_has_failed(
    client: Client, exact_cluster: LocalCluster, tmp_path: Path, gates: Gates
) -> None:
    """One has failed, one has answered, two train; the bits and metrics are those of any run."""
    gates.close("client1-1", "client3-1")
    run = client.submit(failing(gates.folder, "raise", [1, 2, 3]))
    wait_for(run, "UpdateRejected")
    wait_for(run, "UpdateReceived")
    exact_cluster.kill("coordinator")
    gates.open()
    outcome = outcome_of(run)
    assert rejections(outcome) == [(number, CLIENT, "exception") for number in (1, 2, 3)]
    expected = federated_loop(sound(tmp_path), ALLOWED, without([1, 2, 3]))
    assert_same_bits(outcome.state, expected.state)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    other = train(client, failing(undisturbed, "raise", [1, 2, 3]))
    assert other.status.metrics == outcome.status.metrics
    assert other.digests == outcome.digests


@pytest.mark.sweep
def test_the_log_of_the_run_has_the_traceback_of_every_failure(
    client: Client, tmp_path: Path
) -> None:
    outcome = train(client, failing(tmp_path, "raise", [1, 2]))
    lines = [line.text for line in outcome.run.logs()]
    said = [text for text in lines if text.startswith(f"client {CLIENT}, ")]
    assert len(said) == 2
    assert all("KeyError: 'label'" in text and "tests/userland/data.py" in text for text in said)


@pytest.mark.sweep
def test_a_state_that_is_not_finite_ends_its_run_and_is_not_committed(client: Client) -> None:
    """That of a server optimizer, and that of a last step, which no loss would show any more."""
    optimizer = {"server_optimizer": {"name": "fedavgm", "learning_rate": 1e300}}
    huge: dict[str, Any] = {
        "optimizer": {"name": "sgd", "lr": 1e40},
        "steps": 1,
        "checkpoint": {"every": "1 step"},
    }
    for spec, said in (
        (
            federated(rounds=2, options=optimizer),
            r"round 1: the server optimizer fedavgm leads 'model/.*' beyond the range of float32; "
            r"lower strategy.options.server_optimizer.learning_rate \(1e\+300\)",
        ),
        (
            job(**huge),
            r"the state after step 1 is not finite: 'model/.*' has left the range of float32; "
            r"lower optimizer.lr",
        ),
    ):
        run = client.submit(spec)
        with pytest.raises((RunFailedError, UserCodeError)):
            run.result()
        status = run.status()
        assert re.match(said, status.reason), status.reason
        assert [commit.segment for commit in status.commits] == [0]


@pytest.mark.sweep
def test_a_client_without_rows_decides_nothing(client: Client) -> None:
    sizes = [0, 3]
    data = user_data("of_sizes", sizes=sizes)
    outcome = train(client, federated(num_clients=2, rounds=2, data=data, options={"quorum": 1}))
    assert [client_ for _, client_, _ in rejections(outcome)] == [sizes.index(min(sizes))] * 2
