"""Schedules by entry point: torch's schedulers on a shadow, saved, loaded and stepped anew."""

import json
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import OptimizerSpec, entry_points
from stratagem.worker.engine.optimizers import make_optimizer
from stratagem.worker.engine.shadow_schedule import METADATA, ShadowSchedule
from stratagem.worker.federated.client_trainer import ClientRunner
from tests.cluster.jobs import federated
from tests.jobs import job
from tests.reference.loops import federated_loop
from tests.userland import schedules
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits, trainer_of

NAMES = ["one_cycle", "sequential", "lambdas", "warm_restarts", "chained", "multistep", "cyclic"]
NUM_STEPS = 13
GROUPS = [{"name": "biases", "match": ["*.bias"], "lr": 0.02, "weight_decay": 0.0}]
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "groups": GROUPS}
ADAMW = {"name": "adamw", "lr": 0.05, "groups": GROUPS}


def named(name: str) -> str:
    return f"tests.userland.schedules:{name}"


def spec_of(name: str, **optimizer: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate({**ADAMW, "schedule": named(name), **optimizer})


def params_of() -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.zeros(2))) for name in ("0.weight", "0.bias")]


def values_of(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    kept = ("lr", "momentum", "betas", "weight_decay")
    return [[group[key] for key in kept if key in group] for group in optimizer.param_groups]


def told(name: str) -> list[list[list[Any]]]:
    """The values before each step, as torch's scheduler sets them on the optimizer itself."""
    (_, weight), (_, bias) = params_of()
    own: dict[str, Any] = {"params": [bias], "lr": 0.02, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": [weight]}, own], lr=0.05)
    scheduler = getattr(schedules, name)(optimizer, NUM_STEPS)
    found = []
    for _ in range(NUM_STEPS):
        found.append(values_of(optimizer))
        optimizer.step()
        scheduler.step()
    return found


def ours(schedule: ShadowSchedule, num_steps: int) -> list[list[list[Any]]]:
    optimizer = make_optimizer(spec_of("one_cycle"), params_of())
    found = []
    for _ in range(num_steps):
        schedule.set_values(optimizer)
        found.append(values_of(optimizer))
        schedule.step()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_shadow_has_the_values_of_the_optimizer_however_it_goes_on(name: str) -> None:
    expected = told(name)
    schedule = ShadowSchedule(spec_of(name), NUM_STEPS, ALLOWED)
    assert schedule.metadata() == {}
    assert len({json.dumps(values) for values in expected}) > 2
    for step in range(NUM_STEPS):
        saved = schedule.metadata()
        loaded = ShadowSchedule(spec_of(name), NUM_STEPS, ALLOWED)
        loaded.load(saved, step)
        assert loaded.metadata() == saved
        assert ours(loaded, NUM_STEPS - step) == expected[step:]
        stepped = ShadowSchedule(spec_of(name), NUM_STEPS, ALLOWED)
        stepped.load({}, step)
        assert ours(stepped, NUM_STEPS - step) == expected[step:]
        ours(schedule, 1)


def test_other_values_are_stepped_from_the_start() -> None:
    before = ShadowSchedule(spec_of("one_cycle"), NUM_STEPS, ALLOWED)
    ours(before, 5)
    schedule = {"entrypoint": named("one_cycle"), "kwargs": {"peak": 5.0}}
    for changed in ({"lr": 0.5}, {"schedule": schedule}):
        spec = spec_of("one_cycle", **changed)
        after, whole = (ShadowSchedule(spec, NUM_STEPS, ALLOWED) for _ in "12")
        after.load(before.metadata(), 5)
        assert ours(after, 4) == ours(whole, 9)[5:]


def test_a_saved_schedule_is_loaded_without_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ShadowSchedule(spec_of("multistep"), 10**7, ALLOWED)
    ours(schedule, 3)
    saved = json.loads(schedule.metadata()[METADATA])
    calls: list[int] = []
    original = lr_scheduler.MultiStepLR.get_lr

    def counted(self: lr_scheduler.MultiStepLR) -> Any:
        calls.append(1)
        return original(self)

    monkeypatch.setattr(lr_scheduler.MultiStepLR, "get_lr", counted)
    late = {**saved, "applied": 10**6, "position": 10**6 - 1}
    schedule.load({METADATA: json.dumps(late)}, 10**6)
    ours(schedule, 1)
    assert len(calls) == 2  # at the beginning of a fresh one, and for the step


def test_a_federated_client_begins_its_schedule_in_every_round() -> None:
    optimizer = {**SGD, "schedule": named("one_cycle")}
    spec = federated("dropout_mlp", options={"local_epochs": 2}, optimizer=optimizer)
    assert named("one_cycle") in entry_points(spec)
    expected = federated_loop(spec, ALLOWED, clients_of=lambda _: [0], num_rounds=1).state
    base, _ = trainer_of(job("dropout_mlp")).copy_state()
    models = {name: tensor for name, tensor in base.items() if name.startswith("model/")}
    runner = ClientRunner(spec, ALLOWED, CPU)
    for _ in range(2):
        found = runner.run(models, 0, 4, 1).tensors
        assert_same_bits({name[6:]: each for name, each in found.items()}, dict(expected))


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("plateau", "follows an evaluation, and a schedule only the steps"),
        ("forgetful", "has other values after its state is saved and loaded"),
        ("nothing", r"returned a int, which has no step\(\)"),
        ("kept_open", r"cannot be saved: state_dict\(\)\['own'\] is a object"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"optimizer.schedule.entrypoint: .*{told}"):
        trainer_of(job(optimizer={**ADAMW, "schedule": named(schedule)}))


def test_groups_that_the_optimizer_made_have_no_schedule_of_the_jobs() -> None:
    own = {"entrypoint": "tests.userland.optimizers:two_groups", "lr": 0.1}
    with pytest.raises(InvalidInputError, match="needs groups of the job's"):
        trainer_of(job(optimizer={**own, "schedule": named("one_cycle")}))


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({"entrypoint": "a:b", "warmup_steps": 3}, "warmup_steps: belongs to a schedule by name"),
        ({"entrypoint": "a:b", "name": "cosine"}, "needs exactly one of name, entrypoint"),
        ({"name": "cosine", "kwargs": {"a": 1}}, "kwargs: has a meaning only together with entry"),
        ([{"entrypoint": "a:b"}, "cosine"], r"parts\[0\]: is an entry point; a chain holds none"),
    ],
)
def test_what_does_not_go_with_an_entry_point_is_named(schedule: Any, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        OptimizerSpec.parse({**ADAMW, "schedule": schedule})
