"""The section `privacy`: what it says, and what does not go together with it."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.privacy import AFTER_THE_NOISE
from stratagem.common.strategy import Federated, FederatedOptions
from tests.common.strategy.documents import FEDERATED
from tests.jobs import document

pytestmark = pytest.mark.core

RANDOM = {"method": "Random", "fraction": 0.25}


def job_with(privacy: Any, strategy: Any = None, **sections: Any) -> JobSpec:
    whole = FEDERATED | {"num_clients": 100, "client_selection": RANDOM} | (strategy or {})
    empty = {"steps": None, "epochs": None, "checkpoint": None}
    return JobSpec.parse(document(**{**empty, "strategy": whole, "privacy": privacy, **sections}))


def section(**changes: Any) -> dict[str, Any]:
    whole = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def test_what_it_says_is_read_back_and_absent_where_it_says_nothing() -> None:
    assert "privacy" not in job_with(None).canonical_json()
    adaptive = {"norm": 1.0, "adaptive": {"quantile": 0.4}}
    spec = job_with(section(clip=adaptive, target={"epsilon": 8.0, "delta": 1e-5}))
    assert JobSpec.from_json(spec.canonical_json()) == spec
    assert spec.privacy is not None
    assert spec.privacy.clip.adaptive is not None
    assert spec.privacy.clip.adaptive.rate == 0.2


@pytest.mark.parametrize(
    ("sampling", "selection", "rate"),
    [
        ("poisson", RANDOM, 0.25),
        ("fixed", RANDOM, 1.0),
        ("poisson", {"method": "All"}, 1.0),
        ("poisson", {"method": "ByCapability", "required_tags": ["gpu"]}, 1.0),
    ],
)
def test_only_a_secret_draw_is_counted_on(sampling: str, selection: Any, rate: float) -> None:
    spec = job_with(section(sampling=sampling), {"client_selection": selection})
    assert spec.privacy is not None
    assert isinstance(spec.strategy, Federated)
    assert spec.privacy.sampling_rate(spec.strategy) == rate


ADAPTIVE = {"norm": 1.0, "adaptive": {}}
NEEDED = "needs more than 25 clients in a round with noise_multiplier 2.5, and 25 are expected"


@pytest.mark.parametrize(
    ("privacy", "field", "text"),
    [
        (section(noise_multiplier=None), "target.epsilon", "missing; without it, noise_multiplier"),
        (section(noise_multiplier=0.0), "noise_multiplier", "0.1"),
        (section(target={"epsilon": 1.0}), "target.delta", "missing"),
        (section(target={"delta": 1.0}), "target.delta", "must be in (0, 1)"),
        (section(clip={}), "clip.norm", "missing"),
        (section(clip={"norm": 0.0}), "clip.norm", "must be > 0"),
        (section(unit="city"), "unit", "client"),
        (section(epsilon=3), "epsilon", "unknown"),
        (section(noise_multiplier=2.5, clip=ADAPTIVE), "clip.adaptive", NEEDED),
    ],
)
def test_what_it_may_not_say_is_refused_by_field(privacy: Any, field: str, text: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        job_with(privacy)
    (violation,) = refused.value.violations
    assert violation.field == f"privacy.{field}"
    assert text in violation.message


def of_round(**options: Any) -> dict[str, Any]:
    return {"strategy": {"options": options}}


CODED = {"compression": "int8"}
LATE = of_round(over_select=1, late_updates={"discount": 0.5})
OPEN, SILOS = of_round(roster={"open": True}), of_round(inner={"type": "Local"})
STEPS = {"recording": {"client_steps": True}}
AT_CLIENTS = {"data": {"worker_local": "ward"}, "evaluation": {"metrics": []}}
RESUMED = {"initial": {"digest": "0" * 64, "resume": True, "step": 0}}
ROWS = "tests.userland.data:noisy_rows"


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        (CODED, "compression"),
        (LATE, "strategy.options.late_updates"),
        (of_round(over_select=1), "strategy.options.over_select"),
        (OPEN, "strategy.options.roster.open"),
        (of_round(strikes={"limit": 3}), "strategy.options.strikes"),
        (of_round(robust={"name": "median"}), "strategy.options.robust"),
        (SILOS, "strategy.options.inner"),
        (STEPS, "recording.client_steps"),
        (AT_CLIENTS, "evaluation"),
        (RESUMED, "initial.resume"),
    ],
)
def test_what_would_publish_more_than_is_counted_is_refused(sections: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        job_with(section(), **sections)
    assert field in [violation.field for violation in refused.value.violations]


def test_another_strategy_has_no_clients_to_protect_and_an_unknown_option_is_not_harmless() -> None:
    sections: dict[str, Any] = {"strategy": {"type": "Local"}, "epochs": None, "checkpoint": None}
    with pytest.raises(InvalidInputError, match=r"privacy: belongs to Federated only; .* is Local"):
        JobSpec.parse(document(**sections, privacy=section()))
    with pytest.raises(InvalidInputError, match="there are no clients to protect"):
        job_with(section(), execution={"gradient": "None"}, evaluation={"batch_size": 3})
    # Each new option of a round is, until it is listed as one that sees protected updates.
    assert set(vars(FederatedOptions())) > AFTER_THE_NOISE


def rows(**changes: Any) -> dict[str, Any]:
    return section(unit="row", **changes)


def test_what_sees_protected_updates_alone_goes_with_protected_rows() -> None:
    options = {
        "quorum": 0.5,
        "round_deadline_s": 9.0,
        "server_optimizer": {"name": "fedadam"},
        "on_missing_quorum": "wait",
        "local_epochs": 3,
    }
    spec = job_with(rows(target={"epsilon": 8.0, "delta": 1e-5}), {"options": options})
    assert JobSpec.from_json(spec.canonical_json()) == spec
    job_with(rows(), {"options": {"robust": {"name": "median"}}})
    job_with(rows(), {"aggregation": {"method": "FedProx", "mu": 0.1}})
    job_with(rows(), loss={"entrypoint": "tests.userland.losses:tiny"})
    job_with(rows(), execution={"precision": "Full"}, compression="none")


UNKNOWN_NOISE = rows(noise_multiplier=None, target={"epsilon": 1.0, "delta": 1e-5})


@pytest.mark.parametrize(
    ("sections", "field", "text"),
    [
        ({"privacy": UNKNOWN_NOISE}, "privacy.noise_multiplier", "different numbers of rows"),
        ({"privacy": rows(clip=ADAPTIVE)}, "privacy.clip.adaptive", "for the changes of clients"),
        ({"privacy": rows(sampling="fixed")}, "privacy.sampling", '"poisson"'),
        ({"step": "tests.userland.steps:plain", "loss": None}, "step", "sees all rows of a batch"),
        ({"callbacks": "tests.userland.hooks:make"}, "callbacks", "without noise"),
        ({"accumulation": {"micro_batch_size": 4}}, "accumulation", "is clipped"),
        (CODED, "compression", "codec"),
        ({"data": {"entrypoint": ROWS, "collate": "a.b:c"}}, "data.collate", "of other rows"),
        ({"data": {"entrypoint": ROWS, "shuffle_rows": 8}}, "data.streams", "out of a known numbe"),
        ({"execution": {"mode": "Lazy"}}, "execution.mode", "compiles"),
        ({"execution": {"precision": "Mixed"}}, "execution.precision", "Mixed"),
        ({"execution": {"gradient": {"Checkpointed": 2}}}, "execution.gradient", "use Full"),
        ({"execution": {"gradient": {"Accumulated": 2}}}, "execution.gradient", "use Full"),
        ({"loss": "token_cross_entropy"}, "loss", "is not the mean of a loss of e"),
        ({"loss": "model"}, "loss", "use an entry point, or one of bce"),
        (LATE, "strategy.options.late_updates", "protected updates alone"),
        (SILOS, "strategy.options.inner", "protected updates alone"),
        (OPEN, "strategy.options.roster", "protected updates alone"),
        (STEPS, "recording.client_steps", "not published"),
        (AT_CLIENTS, "evaluation", "without noise"),
        (RESUMED, "initial.resume", "not known"),
    ],
)
def test_what_would_show_a_row_is_refused(sections: Any, field: str, text: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        job_with(**{"privacy": rows(), **sections})
    found = {violation.field: violation.message for violation in refused.value.violations}
    assert text in found[field]


def test_batch_norm_in_a_graph_is_refused_at_submit() -> None:
    node = {"id": "norm", "module": "BatchNorm1d", "kwargs": {"num_features": 4}}
    with pytest.raises(InvalidInputError) as refused:
        job_with(rows(), model={"graph": {"nodes": [node], "edges": []}})
    (violation,) = refused.value.violations
    assert violation.field == "model.graph.nodes[0].module"
    assert '"norm" is BatchNorm1d, which mixes the rows of a batch' in violation.message
