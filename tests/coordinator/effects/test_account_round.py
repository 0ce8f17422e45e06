"""What a private round will cost is computed while the round before it trains."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stratagem.common.base.ids import Party, RunId
from stratagem.common.job import JobSpec
from stratagem.common.privacy import accountant
from stratagem.coordinator.core.effects import AccountRound
from stratagem.coordinator.core.facts import RoundAccounted
from stratagem.coordinator.effects.context import LiveRuns
from stratagem.coordinator.effects.private import account_round
from stratagem.coordinator.runtime.supervisor import Chores
from tests.jobs import document

JOB = JobSpec.parse(
    document(
        epochs=None,
        checkpoint=None,
        strategy={
            "type": "Federated",
            "num_clients": 4,
            "rounds": 3,
            "aggregation": {"method": "FedAvg"},
            "client_selection": {"method": "Random", "fraction": 0.5},
        },
        privacy={
            "clip": {"norm": 1.0},
            "noise_multiplier": 2.0,
            "target": {"delta": 1e-5},
            "noise": "seeded",
        },
    )
)


@pytest.mark.parametrize(("round_num", "asked"), [(1, [3, 4]), (2, [4, 5]), (3, [5])])
def test_the_round_after_is_accounted_ahead(
    monkeypatch: pytest.MonkeyPatch, round_num: int, asked: list[int]
) -> None:
    """With two more rounds spent than the run has had, as after a return to an earlier commit."""
    computed: list[int] = []

    def epsilon_after(num_rounds: int, noise: float, rate: float, delta: float) -> float:
        assert (noise, rate, delta) == (2.0, 0.5, 1e-5)
        computed.append(num_rounds)
        return float(num_rounds)

    monkeypatch.setattr(accountant, "epsilon_after", epsilon_after)
    monkeypatch.setattr(accountant, "accountant_version", lambda: "counts")
    facts: list[Any] = []

    async def account() -> None:
        chores = Chores()

        async def report(_run_id: RunId, fact: Any) -> None:
            assert computed == asked[:1], "the round that waits comes first"
            facts.append(fact)

        runs = SimpleNamespace(job_of=lambda _run_id, _party: JOB, report=report, chores=chores)
        effect = AccountRound(
            RunId("r"), Party(""), round_num, (0, 1, 2, 3), round_num + 1, 1.0, 2.0, ""
        )
        await account_round(cast(LiveRuns, runs), effect)
        await asyncio.gather(*chores._tasks)

    asyncio.run(account())
    assert computed == asked
    (fact,) = facts
    assert isinstance(fact, RoundAccounted)
    assert fact.epsilon == asked[0]
