"""Builders that the engine's tests share."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.numerics.shards import assign_shards
from stratagem.worker.engine import EvaluationPart, Trainer, build_trainer
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.reducer import GradientReducer, SingleMemberReducer, solo_exchange
from stratagem.worker.numerics.precision import ALL_NUMBERS, obstacle
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.jobs import ALLOW, LOSSES, NOT_TRAINED, job
from tests.reference.loops import Result, sharded_loop

CPU = torch.device("cpu")
ALLOWED = EntryPoints([ALLOW, "examples.digits:*"])


def trainer_of(spec: JobSpec, *, fresh: bool = True, numerics: int = CURRENT) -> Trainer:
    return build_trainer(spec, ALLOWED, device=CPU, fresh=fresh, numerics=numerics)


def is_refused_here(spec: JobSpec) -> bool:
    """Whether this machine's processor lacks what LSTM needs; then the job must be refused."""
    asked = f"{spec.execution.precision} in {spec.execution.amp_dtype or 'bfloat16'}"
    numbers = next((each for each in ALL_NUMBERS if str(each) == asked), None)
    has_lstm = str(spec.model.entrypoint).endswith(":LastOfSequence")
    reason = obstacle("LSTM", numbers, CPU, True) if has_lstm and numbers else None
    if reason is None:
        return False
    with pytest.raises(InvalidInputError) as caught:
        trainer_of(spec)
    assert f"cannot compute {asked}: LSTM (lstm): {reason}" in str(caught.value)
    return True


def evaluated(
    trainer: Trainer, split: str = "test", *, rank: int = 0, size: int = 1
) -> list[EvaluationPart]:
    """The share of one of `size` members in an evaluation of the present state."""
    evaluator = trainer.evaluator()
    return [evaluator.part(*batch) for batch in evaluator.share([split], rank, size)]


def solo(trainer: Trainer, num_shards: int) -> GradientReducer | SingleMemberReducer:
    """What a worker uses that owns all shards."""
    if num_shards == 1 and SingleMemberReducer.fits(trainer.params):
        return SingleMemberReducer(trainer.params, trainer.setup.numerics)
    return in_buckets(trainer, num_shards)


def in_buckets(trainer: Trainer, num_shards: int) -> GradientReducer:
    """The same in flat buckets, as several members have it."""
    buckets = GradientBuckets(trainer.params, num_extras=trainer.num_extras)
    return solo_exchange(buckets, num_shards)


def train(trainer: Trainer, num_shards: int, num_steps: int) -> list[float]:
    """The losses of some steps with one member that owns all shards."""
    exchange = solo(trainer, num_shards)
    owned = assign_shards(num_shards, 1)[0]
    losses = [trainer.train_step(exchange, owned, num_shards).loss for _ in range(num_steps)]
    exchange.close()
    return losses


def assert_equals_loop(
    spec: JobSpec,
    num_shards: int,
    num_steps: int = 5,
    *,
    numerics: int = CURRENT,
    expected: Result | None = None,
) -> Trainer:
    """One member has the losses, the logs and the bits of the sharded loop; its trainer."""
    trainer = trainer_of(spec, numerics=numerics)
    exchange, owned = solo(trainer, num_shards), assign_shards(num_shards, 1)[0]
    reports = [trainer.train_step(exchange, owned, num_shards) for _ in range(num_steps)]
    exchange.close()
    if expected is None:
        expected = sharded_loop(spec, ALLOWED, num_shards, num_steps, numerics=numerics)
    assert [report.loss for report in reports] == expected.losses
    assert [report.logged for report in reports] == expected.logged
    assert_same_bits(model_of(trainer), dict(expected.state))
    return trainer


def assert_goes_on(
    spec: JobSpec,
    num_shards: int,
    at: int = 3,
    num_steps: int = 5,
    *,
    straight: Trainer | None = None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A run that stops after some steps ends with the bits of the undisturbed one; its state.

    straight: one that has trained all of these steps already.
    """
    if straight is None:
        straight = trainer_of(spec)
        train(straight, num_shards, num_steps)
    first, second = trainer_of(spec), trainer_of(spec, fresh=False)
    train(first, num_shards, at)
    tensors, metadata = first.copy_state()
    train(first, num_shards, 1)  # the copy must not notice
    second.load_state(tensors, metadata)
    assert second.step == at
    torch.rand(3)  # what others draw between is of no matter
    train(second, num_shards, num_steps - at)
    assert second.fingerprint() == straight.fingerprint()
    assert_same_bits(second.state()[0], straight.state()[0])
    return tensors, metadata


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def model_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch has allocated at once on the CPU during a call, beyond what it began
    with."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    sizes: list[int] = [change for _, change in sorted(changes)]
    return max(accumulate(sizes, initial=0))


METRICS = ["accuracy", "perplexity", f"{LOSSES}:confidence", "tests.userland.metrics:macro_f1"]


def evaluating(model: str = "mlp", batch_size: int = 5, **changes: Any) -> Any:
    evaluation = {"split": "test", "metrics": METRICS, "batch_size": batch_size}
    execution = {**NOT_TRAINED["execution"], **changes.pop("execution", {})}
    sections = {**NOT_TRAINED, "evaluation": evaluation, "execution": execution, **changes}
    return job(model, **sections)
