"""The section `privacy`: what it says, and what does not go together with it."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.privacy.row_rules import AFTER_THE_NOISE
from stratagem.common.strategy import Federated, FederatedOptions
from tests.jobs import document

pytestmark = pytest.mark.core

RANDOM = {"method": "Random", "fraction": 0.25}


def job_with(privacy: Any, strategy: Any = None, **sections: Any) -> JobSpec:
    whole = {
        "type": "Federated",
        "num_clients": 100,
        "rounds": 5,
        "aggregation": {"method": "FedAvg"},
        "client_selection": RANDOM,
        **(strategy or {}),
    }
    empty = {"steps": None, "epochs": None, "checkpoint": None}
    return JobSpec.parse(document(**{**empty, "strategy": whole, "privacy": privacy, **sections}))


def section(**changes: Any) -> dict[str, Any]:
    whole = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def test_a_job_without_it_has_the_text_that_it_had() -> None:
    assert "privacy" not in job_with(None).canonical_json()


def test_what_it_says_is_read_back() -> None:
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


WRONG: dict[str, tuple[Any, str, str]] = {
    "no noise and no target": (
        section(noise_multiplier=None),
        "privacy.target.epsilon",
        "missing; without it, noise_multiplier says how much noise there is",
    ),
    "too little noise": (section(noise_multiplier=0.0), "privacy.noise_multiplier", "0.1"),
    "no delta": (section(target={"epsilon": 1.0}), "privacy.target.delta", "missing"),
    "delta of one": (section(target={"delta": 1.0}), "privacy.target.delta", "must be in (0, 1)"),
    "no clipping": (section(clip={}), "privacy.clip.norm", "missing"),
    "a norm of zero": (section(clip={"norm": 0.0}), "privacy.clip.norm", "must be > 0"),
    "another unit": (section(unit="city"), "privacy.unit", "client"),
    "another word": (section(epsilon=3), "privacy.epsilon", "unknown"),
    "answers that cost as much": (
        section(noise_multiplier=2.5, clip={"norm": 1.0, "adaptive": {}}),
        "privacy.clip.adaptive",
        "needs more than 25 clients in a round with noise_multiplier 2.5, and 25 are expected",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_may_not_say_is_refused_by_field(case: str) -> None:
    privacy, field, text = WRONG[case]
    with pytest.raises(InvalidInputError) as refused:
        job_with(privacy)
    (violation,) = refused.value.violations
    assert violation.field == field
    assert text in violation.message


LATE = {"over_select": 1, "late_updates": {"discount": 0.5}}
TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "compression": ({"compression": "int8"}, "compression"),
    "late": ({"strategy": {"options": LATE}}, "strategy.options.late_updates"),
    "over": ({"strategy": {"options": {"over_select": 1}}}, "strategy.options.over_select"),
    "open roster": (
        {"strategy": {"options": {"roster": {"open": True}}}},
        "strategy.options.roster.open",
    ),
    "strikes": ({"strategy": {"options": {"strikes": {"limit": 3}}}}, "strategy.options.strikes"),
    "robust": (
        {"strategy": {"options": {"robust": {"name": "median"}}}},
        "strategy.options.robust",
    ),
    "silos": ({"strategy": {"options": {"inner": {"type": "Local"}}}}, "strategy.options.inner"),
    "steps of clients": ({"recording": {"client_steps": True}}, "recording.client_steps"),
    "evaluation at clients": (
        {"data": {"worker_local": "ward"}, "evaluation": {"metrics": []}},
        "evaluation",
    ),
    "resumed": (
        {"initial": {"digest": "0" * 64, "resume": True, "step": 0}},
        "initial.resume",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_what_would_publish_more_than_is_counted_is_refused(case: str) -> None:
    sections, field = TOGETHER[case]
    with pytest.raises(InvalidInputError) as refused:
        job_with(section(), **sections)
    assert field in [violation.field for violation in refused.value.violations]


def test_another_strategy_has_no_clients_to_protect() -> None:
    sections: dict[str, Any] = {"strategy": {"type": "Local"}, "epochs": None, "checkpoint": None}
    with pytest.raises(InvalidInputError, match=r"privacy: belongs to Federated only; .* is Local"):
        JobSpec.parse(document(**sections, privacy=section()))


def test_a_job_that_trains_nothing_protects_nobody() -> None:
    with pytest.raises(InvalidInputError, match="there are no clients to protect"):
        job_with(section(), execution={"gradient": "None"}, evaluation={"batch_size": 3})


def rows(**changes: Any) -> dict[str, Any]:
    return section(unit="row", **changes)


def test_protected_rows_are_read_back() -> None:
    spec = job_with(rows(target={"epsilon": 8.0, "delta": 1e-5}))
    assert JobSpec.from_json(spec.canonical_json()) == spec


def test_what_sees_protected_updates_alone_goes_with_protected_rows() -> None:
    options = {
        "quorum": 0.5,
        "round_deadline_s": 9.0,
        "server_optimizer": {"name": "fedadam"},
        "on_missing_quorum": "wait",
        "local_epochs": 3,
    }
    job_with(rows(), {"options": options})
    job_with(rows(), {"options": {"robust": {"name": "median"}}})
    job_with(rows(), {"aggregation": {"method": "FedProx", "mu": 0.1}})
    job_with(rows(), loss={"entrypoint": "tests.userland.losses:tiny"})
    job_with(rows(), execution={"precision": "Full"}, compression="none")


WRONG_WITH_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "noise to be computed": (
        {"privacy": rows(noise_multiplier=None, target={"epsilon": 1.0, "delta": 1e-5})},
        "privacy.noise_multiplier",
        "they have different numbers of rows",
    ),
    "adaptive clipping": (
        {"privacy": rows(clip={"norm": 1.0, "adaptive": {}})},
        "privacy.clip.adaptive",
        "for the changes of clients",
    ),
    "a fixed draw": ({"privacy": rows(sampling="fixed")}, "privacy.sampling", '"poisson"'),
    "a step of one's own": (
        {"step": "tests.userland.steps:plain", "loss": None},
        "step",
        "sees all rows of a batch at once",
    ),
    "callbacks": ({"callbacks": "tests.userland.hooks:make"}, "callbacks", "without noise"),
    "accumulation": ({"accumulation": {"micro_batch_size": 4}}, "accumulation", "is clipped"),
    "a codec": ({"compression": "int8"}, "compression", "codec"),
    "a batch of several rows": (
        {"data": {"entrypoint": "tests.userland.data:noisy_rows", "collate": "a.b:c"}},
        "data.collate",
        "of other rows",
    ),
    "a stream": (
        {"data": {"entrypoint": "tests.userland.data:noisy_rows", "shuffle_rows": 8}},
        "data.streams",
        "out of a known number",
    ),
    "compiled code": ({"execution": {"mode": "Lazy"}}, "execution.mode", "compiles"),
    "16 bits": ({"execution": {"precision": "Mixed"}}, "execution.precision", "Mixed"),
    "recomputed activations": (
        {"execution": {"gradient": {"Checkpointed": 2}}},
        "execution.gradient",
        "use Full",
    ),
    "micro-batches": (
        {"execution": {"gradient": {"Accumulated": 2}}},
        "execution.gradient",
        "use Full",
    ),
    "a loss of tokens": (
        {"loss": "token_cross_entropy"},
        "loss",
        "is not the mean of a loss of each row",
    ),
    "a loss of the model's": ({"loss": "model"}, "loss", "use an entry point, or one of bce"),
    "late updates": (
        {"strategy": {"options": LATE}},
        "strategy.options.late_updates",
        "protected updates alone",
    ),
    "silos": (
        {"strategy": {"options": {"inner": {"type": "Local"}}}},
        "strategy.options.inner",
        "protected updates alone",
    ),
    "an open roster": (
        {"strategy": {"options": {"roster": {"open": True}}}},
        "strategy.options.roster",
        "protected updates alone",
    ),
    "steps of clients": (
        {"recording": {"client_steps": True}},
        "recording.client_steps",
        "not published",
    ),
    "evaluation at clients": (
        {"data": {"worker_local": "ward"}, "evaluation": {"metrics": []}},
        "evaluation",
        "without noise",
    ),
    "resumed": (
        {"initial": {"digest": "0" * 64, "resume": True, "step": 0}},
        "initial.resume",
        "not known",
    ),
}


@pytest.mark.parametrize("case", WRONG_WITH_ROWS)
def test_what_would_show_a_row_is_refused(case: str) -> None:
    sections, field, text = WRONG_WITH_ROWS[case]
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


def test_an_option_that_is_not_known_to_be_harmless_is_refused() -> None:
    """Each new option of a round is, until it is listed as one that sees protected updates."""
    assert set(vars(FederatedOptions())) > AFTER_THE_NOISE
