"""A population in one process: ordinary training loops that copy each other's state."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec, member_job
from stratagem.common.strategy import PopulationBased
from stratagem.coordinator.strategies.population.evolution import donors, draw, explored, stream
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.engine.optimizers import make_optimizer
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import rows_dtype
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.jobs import ALLOW
from tests.reference.objective import objective_of
from tests.reference.rates import Rates
from tests.reference.row_batches import epoch_batches, read
from tests.reference.stream_rows import PlainStreams
from tests.reference.weight_average import RunningAverage

ALLOWED = EntryPoints([ALLOW])


@dataclass
class Member:
    """A member of the reference: an ordinary training loop that can be copied."""

    spec: JobSpec
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rates: Rates
    params: dict[str, Any]
    average: RunningAverage
    step: int = 0

    @classmethod
    def begin(cls, spec: JobSpec, params: dict[str, Any]) -> "Member":
        model = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
        optimizer = _optimizer_of(spec, model)
        average = RunningAverage(spec.weight_average, list(model.parameters()))
        rates = Rates(spec, optimizer, spec.steps or 0, ALLOWED)
        return cls(spec, model, optimizer, rates, params, average)

    def train(self, num_steps: int) -> None:
        data = load_data(self.spec, ALLOWED, DataSources())["train"]
        source = PlainStreams(self.spec, data) if isinstance(data, StreamDataset) else data
        gather = Gather(rows_dtype(self.spec, self.model), torch.device("cpu"))
        loss_fn = objective_of(self.spec, ALLOWED)
        randomness = KeyedRandomness(self.model, torch.device("cpu"))
        per_epoch = len(epoch_batches(self.spec, ALLOWED, data, 0))
        self.model.train()
        for _ in range(num_steps):
            epoch, position = divmod(self.step, per_epoch)
            rows = epoch_batches(self.spec, ALLOWED, data, epoch)[position]
            row_key, key = (self.spec.seed, "row", epoch), (self.spec.seed, self.step, 0, 0)
            x, y = read(gather, source, rows, row_key, key, randomness)
            value = loss_fn(self.model, x, y, len(rows))
            self.optimizer.zero_grad()
            (value.mean * value.weight).backward()
            for param in self.model.parameters():
                assert param.grad is not None
                param.grad /= value.weight
            self.rates.before(self.step)
            self.optimizer.step()
            self.rates.after()
            self.step += 1
            self.average.update(self.step)

    def loss(self) -> float:
        data = load_data(self.spec, ALLOWED, DataSources())["test"]
        gather = Gather(rows_dtype(self.spec, self.model), torch.device("cpu"))
        keys = ("row", "evaluate", "test"), ("evaluate", "test", 0)
        x, y = read(gather, data, torch.arange(len(data)), *keys)
        measured = copy.deepcopy(self.model).eval()
        measured.load_state_dict(self.average.model_state(self.model) or self.model.state_dict())
        with torch.no_grad():
            value = objective_of(self.spec, ALLOWED)(measured, x, y, len(data))
        return float(value.mean)

    def copy_of(self, spec: JobSpec, params: dict[str, Any]) -> "Member":
        model = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
        model.load_state_dict(self.model.state_dict())
        optimizer = _optimizer_of(spec, model)
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        for old, new in pairs:
            optimizer.state[new] = copy.deepcopy(self.optimizer.state[old])
        average = self.average.copied(list(model.parameters()))
        rates = Rates(spec, optimizer, spec.steps or 0, ALLOWED, behind=self.step)
        return Member(spec, model, optimizer, rates, params, average, self.step)


def _optimizer_of(spec: JobSpec, model: nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(spec.optimizer, model.named_parameters(), entrypoints=ALLOWED)


def population_loop(
    spec: JobSpec, structural: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], list[dict[int, int]]]:
    """(the best member's state after the last generation, who copied whom in each).

    structural: hyperparameters that a copy has from its donor, as it has the state.
    """
    strategy = spec.strategy
    assert isinstance(strategy, PopulationBased)
    assert spec.search_space is not None
    assert spec.steps_per_generation is not None
    drawn = [
        draw(spec.search_space, stream(spec.seed, m, 0)) for m in range(strategy.population_size)
    ]
    members = [Member.begin(member_job(spec, m, params), params) for m, params in enumerate(drawn)]
    history = []
    for generation in range(1, strategy.generations + 1):
        for member in members:
            member.train(spec.steps_per_generation)
        losses = [member.loss() for member in members]
        if generation == strategy.generations:
            break
        rngs = [stream(spec.seed, m, generation) for m in range(len(members))]
        copies = donors(strategy.exploit, [-loss for loss in losses], rngs)
        history.append(copies)
        old = list(members)
        for number, donor in copies.items():
            params = explored(
                strategy.explore, spec.search_space, old[donor].params, rngs[number], structural
            )
            members[number] = old[donor].copy_of(member_job(spec, number, params), params)
    best = min(range(len(members)), key=lambda m: losses[m])
    return dict(members[best].model.state_dict()), history
