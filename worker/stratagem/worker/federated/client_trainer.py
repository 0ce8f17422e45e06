"""Train one federated client for one round: local epochs over the client's own rows.

Clients are stateless: each round starts from the global state with a fresh optimizer, and its
sample order and random numbers depend on (seed, client, round) only, so a round that is done again
gives the same update. Rounds count from 1. The module knows neither the coordinator nor other
clients' data.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import Key
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import Federated, FedProx
from stratagem.worker.data.datasets import Dataset, training_split
from stratagem.worker.data.order import epoch_order
from stratagem.worker.data.sources import ClientData, ClientShare, DataSources
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.engine import state_format
from stratagem.worker.engine.apply_step import (
    ReportedRates,
    StepPlace,
    StepPolicy,
    place_of,
)
from stratagem.worker.engine.buffers import Buffers
from stratagem.worker.engine.callbacks import StepView, make_callbacks
from stratagem.worker.engine.forward_backward import (
    LoggedSums,
    Passes,
    Rows,
    Window,
    added,
    means,
    micro_batches,
)
from stratagem.worker.engine.round_trip import check_optimizer_of
from stratagem.worker.engine.shadow_schedule import ShadowSchedule, shadow_schedule
from stratagem.worker.engine.turns import (
    LocalReport,
    LocalStep,
    StepTurn,
    make_optimizer_of,
    make_turns,
    unfreeze,
    whole_local_step,
)
from stratagem.worker.federated.row_privacy import (
    RowCosts,
    RowGradients,
    RowNoise,
    check_rows_apart,
)
from stratagem.worker.models.build import build_model
from stratagem.worker.models.tensors import ModelForm
from stratagem.worker.numerics.model import make_gather, prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.evaluator import EvaluationShare, Evaluator
from stratagem.worker.objectives.step_function import make_objective
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Federated client ----

# Keeps the sample orders of different clients apart; client 0 has those of an undivided run.
_CLIENT_STRIDE = 0x9E3779B97F4A7C15
_SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ClientRound:
    """The result of a client's round: its trained model, weighted by its number of rows."""

    tensors: Mapping[str, Tensor]
    num_samples: int
    loss: float
    num_steps: int
    metrics: Mapping[str, float]
    """The metrics of the client's steps. max_grad_norm: the largest finite 2-norm of a step's
    gradient before clipping. skipped_steps, if they may occur: the number of steps skipped as not
    finite. Also the means of values logged by the step function, and the latest values logged by
    on_step."""
    trained: frozenset[str]
    """Names of the trainable parameters; tied parameters have several names."""
    num_applied: int
    """Number of steps that were not skipped."""
    reach: Mapping[str, float] = field(default_factory=dict)
    """Sum of the learning rates of the applied corrected steps, keyed by name of the trained
    parameter."""


@dataclass(frozen=True, slots=True)
class ClientStep:
    """A local step that a client has finished: its number, rows, report and logged values."""

    number: int
    """The number of the step in its round, from 1."""
    num_rows: int
    report: LocalReport
    shown: Mapping[str, float]
    """Values that on_step has logged."""


@dataclass(frozen=True, slots=True)
class Toward:
    """A penalty on the distance of the model v to a state w: (strength / 2)·‖v − w‖² over the
    trained parameters."""

    state: Mapping[str, Tensor]
    strength: float


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """The settings of a client's round besides the job and the global state."""

    num_lr_reductions: int = 0
    """Number of plateau reductions of the learning rates so far."""
    row_noise: RowNoise | None = None
    """Selects rows and adds noise in jobs with protected rows; None in others."""
    toward: Toward | None = None
    """Train near this state without calling on_step; None to train near `base`, as FedProx does."""
    correction: Mapping[str, Tensor] | None = None
    """The term added to the gradient in every step, keyed by name of the parameter."""


def client_order(num_rows: int, seed: int, client: int, epoch: int) -> Tensor:
    """Return the order of a client's rows in an epoch. epoch: counted over all rounds, from 0."""
    return epoch_order(num_rows, (seed + client * _CLIENT_STRIDE + epoch) & _SEED_BITS)


class ClientRunner:
    """Trains clients of one job, a round per call; keeps the model and the data in between."""

    def __init__(
        self,
        job: JobSpec,
        entrypoints: EntryPoints,
        device: torch.device,
        sources: DataSources | None = None,
        numerics: int = CURRENT,
    ) -> None:
        if not isinstance(job.strategy, Federated):
            raise InvalidInputError.at("strategy", "a client's round needs a Federated strategy")
        self._job, self._strategy, self._entrypoints = job, job.strategy, entrypoints
        sources = sources or DataSources()
        self._data = ClientData(job, entrypoints, sources, numerics)
        self._model = build_model(job, entrypoints, device=device, fresh=False)
        check_optimizer_of(job, self._model, entrypoints)
        check_rows_apart(job, self._model)
        self._callbacks = make_callbacks(job, entrypoints)
        self._callbacks.built(self._model)
        self._named = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self._params = [param for _, param in self._named]
        objective = make_objective(job, entrypoints)
        gather = make_gather(job, self._model, device, sources.readers)
        randomness = KeyedRandomness(self._model, device)
        self._execution = prepare(self._model, job, device, randomness, numerics)
        self._passes = Passes(self._model, objective, gather, randomness, self._execution)
        self._randomness = randomness
        self._buffers, self._numerics = Buffers(self._model, device), numerics
        self._form = ModelForm(self._model, self._named)
        live = self._model.state_dict(keep_vars=True).items()
        trained = (name for name, tensor in live if tensor.requires_grad)
        self._trained = frozenset(f"{state_format.MODEL}{name}" for name in trained)

    def run(
        self,
        base: Mapping[str, Tensor],
        client: int,
        num_clients: int,
        round_num: int,
        check: Callable[[], None] = lambda: None,
        *,
        after_step: Callable[[ClientStep], None] = lambda _: None,
        settings: RoundSettings | None = None,
    ) -> ClientRound:
        """Train a client for one round from the state `base`; return the result, on the CPU. check:
        called before each step, may raise to end the round. after_step: called with each finished
        step."""
        settings = settings or RoundSettings()
        data = self._rows(ClientShare(client, num_clients))
        self._form.check()
        state_format.load_model_state(self._model, base)
        self._form.note_extra()
        pull = self._pull(settings)
        sees_steps = self._callbacks.sees_steps and settings.toward is None
        noise = settings.row_noise
        protected = None if noise is None else self._protected(len(data), noise)
        local_steps = self._fresh_steps(data, settings.num_lr_reductions, protected)
        self._model.train()
        self._execution.scale.load({})
        loss_sum = weight_sum = max_norm = 0.0
        logged: LoggedSums = {}
        latest: dict[str, float] = {}
        num_rows = num_steps = num_skipped = 0
        is_ended = False
        self._passes.gather.expect(
            batch
            for rows, key in self._steps(data, client, round_num, protected)
            for local_step in local_steps
            for batch in micro_batches(rows, self._cuts(rows), _keys(key, local_step.turn))
        )
        try:
            for rows, key in self._steps(data, client, round_num, protected):
                check()
                num_steps, num_rows = num_steps + 1, num_rows + len(rows.indices)
                report = self._step(local_steps, round_num, pull, rows, key)
                num_skipped += report.num_skipped
                if not report.is_skipped:
                    loss_sum += report.counted.loss_sum
                    weight_sum += report.counted.weight
                    logged = added(logged, report.counted.logged)
                    if math.isfinite(report.grad_norm):
                        max_norm = max(max_norm, report.grad_norm)
                values: Mapping[str, float] = {}
                if sees_steps:
                    seen = _seen(num_steps, rows, report)
                    self._callbacks.saw_step(seen)
                    values, is_ended = seen.logged, seen.wants_end
                    latest = {**latest, **values}
                after_step(ClientStep(num_steps, len(rows.indices), report, values))
                if is_ended:
                    break
        finally:
            self._randomness.end()
            if self._job.turns is not None:
                unfreeze(self._named)
        if not num_steps:
            raise _no_rows(client, num_clients)
        self._form.check()
        failpoint("worker.client_round.after_training")
        tensors = state_format.copied(state_format.model_state(self._model))
        mean_loss = loss_sum / weight_sum if weight_sum else 0.0
        may_skip = self._job.window.may_skip or num_skipped  # else by the scale of a 16-bit loss
        skipped = {"skipped_steps": float(num_skipped)} if may_skip else {}
        metrics = {"max_grad_norm": max_norm, **skipped, **means(logged), **latest}
        num_samples = num_rows // self._strategy.options.local_epochs
        if is_ended or protected is not None:  # it weighs as it would have, or without a draw
            num_samples = max(1, num_samples) if isinstance(data, StreamDataset) else len(data)
        num_applied = num_steps - num_skipped
        reach = {} if settings.correction is None else self._reach(local_steps[0], num_applied)
        done = (tensors, num_samples, mean_loss, num_steps, metrics, self._trained)
        return ClientRound(*done, num_applied, reach)

    def loss_before(
        self,
        base: Mapping[str, Tensor],
        client: int,
        num_clients: int,
        check: Callable[[], None] = lambda: None,
    ) -> float:
        """Return the mean loss of a global state over a client's rows."""
        data = self._rows(ClientShare(client, num_clients))
        state_format.load_model_state(self._model, base)
        return loss_before(self._model, self._passes, data, self._job.batch_size, check)

    def num_rows(self, client: int, num_clients: int) -> int:
        """Return the number of a client's training rows. Raises InvalidInputError for a stream."""
        rows = self._rows(ClientShare(client, num_clients))
        if isinstance(rows, StreamDataset):
            text = "comes as a stream, and privacy.unit row draws rows one by one of a known number"
            raise InvalidInputError.at("data.train", text)
        return len(rows)

    def _protected(self, num_rows: int, noise: RowNoise) -> RowGradients:
        assert self._job.privacy is not None
        costs = RowCosts.of(self._job, num_rows)
        norm = self._job.privacy.clip.norm
        return RowGradients(self._passes, self._named, norm, costs, noise)

    def steps_in_round(self, client: int, num_clients: int) -> int | None:
        """Return the number of steps in a client's round; None if its rows come as a stream."""
        return self._num_steps(self._rows(ClientShare(client, num_clients)))

    def _num_steps(self, data: Dataset) -> int | None:
        if isinstance(data, StreamDataset):
            return None
        return self._strategy.options.local_epochs * -(-len(data) // self._job.batch_size)

    def _steps(
        self, data: Dataset, client: int, round_num: int, protected: RowGradients | None = None
    ) -> Iterator[tuple[Rows, Key]]:
        """Yield each step of a client's round: its rows, and the key of its random numbers."""
        num_rounds_before, first = round_num - 1, f"round {round_num}, client {client}"
        if protected is not None:
            row_key = (self._job.seed, "row", "client", client, num_rounds_before)
            for step, drawn in enumerate(protected.drawn_rows()):
                key = (self._job.seed, "client", client, round_num, step)
                yield Rows(data, drawn, f"{first}, step {step + 1}", row_key), key
            return
        local_epochs, num_steps = self._strategy.options.local_epochs, 0
        for local_epoch in range(local_epochs):
            epoch = (round_num - 1) * local_epochs + local_epoch
            row_key = (self._job.seed, "row", "client", client, epoch)
            for dataset, indices in self._batches(data, client, epoch):
                key = (self._job.seed, "client", client, round_num, num_steps)
                num_steps += 1
                activity = f"{first}, step {num_steps}"
                yield Rows(dataset, indices, activity, row_key), key

    def _cuts(self, rows: Rows) -> Sequence[range]:
        return self._job.window.cut(len(rows.indices))

    @property
    def notes(self) -> list[str]:
        """Return sentences about settings that this worker applies differently than written."""
        return self._execution.notes

    @property
    def _mu(self) -> float:
        aggregation = self._strategy.aggregation
        return aggregation.mu if isinstance(aggregation, FedProx) else 0.0

    def _reach(self, local_step: LocalStep, num_applied: int) -> dict[str, float]:
        """Return the summed learning rates of the applied steps, by parameter."""
        optimizer = local_step.turn.policy.optimizer
        assert optimizer is not None, "a client holds the whole model"
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        return {name: num_applied * float(rates[id(param)]) for name, param in self._named}

    def _pull(self, settings: RoundSettings) -> Callable[[], None]:
        """Return a function that changes the gradient of each step before it is applied."""
        if settings.correction is None:
            return self._toward(settings.toward)
        added = [
            torch.empty_like(param).copy_(settings.correction[name]) for name, param in self._named
        ]

        def correct() -> None:
            for param, term in zip(self._params, added, strict=True):
                # A parameter that no loss has reached has a gradient of zero.
                param.grad = term.clone() if param.grad is None else param.grad.add_(term)

        return correct

    def _toward(self, toward: Toward | None) -> Callable[[], None]:
        """Return a function that adds the gradient of (mu / 2)·‖w − anchor‖² to that of a step; for
        mu = 0 it does nothing, so that FedProx then has the same bits as FedAvg."""
        mu, anchors = self._mu, [param.detach().clone() for param in self._params if self._mu]
        if toward is not None:
            mu, given = (
                toward.strength,
                (toward.state[f"{state_format.MODEL}{n}"] for n, _ in self._named),
            )
            anchors = [
                torch.empty_like(param).copy_(anchor)
                for param, anchor in zip(self._params, given, strict=True)
            ]

        def pull() -> None:
            # Parameters of other turns have no gradient.
            for param, anchor in zip(self._params, anchors, strict=False):
                if param.grad is not None:
                    param.grad.add_(param.detach() - anchor, alpha=mu)

        return pull

    def _rows(self, client: ClientShare) -> Dataset:
        train = training_split(self._data.of(client))
        if len(train) == 0 and not isinstance(train, StreamDataset):
            raise _no_rows(client.number, client.num_clients)
        return train

    def _batches(self, data: Dataset, client: int, epoch: int) -> Iterator[tuple[Dataset, Tensor]]:
        """Yield the batches of one epoch as rows of a data set; a stream is read to its end."""
        if isinstance(data, StreamDataset):
            for fetched in data.client_batches(client, epoch):
                yield fetched, torch.arange(len(fetched))
            return
        order = client_order(len(data), self._job.seed, client, epoch)
        for indices in torch.split(order, self._job.batch_size):
            yield data, indices

    def _schedule(self, data: Dataset) -> ShadowSchedule | None:
        """Make the user's learning-rate schedule for a round; None if there is none."""
        if self._job.turns is not None or self._job.optimizer.schedule is None:
            return None
        if self._job.optimizer.schedule.entrypoint is None:
            return None
        num_steps = self._num_steps(data)
        if num_steps is None:
            text = "needs the number of steps, which a round over a stream does not know before"
            raise InvalidInputError.at("optimizer.schedule.entrypoint", text)
        return shadow_schedule(self._job.optimizer, num_steps, self._entrypoints)

    def _fresh_steps(
        self, data: Dataset, num_lr_reductions: int, protected: RowGradients | None
    ) -> list[LocalStep]:
        """Make the local steps of a round, one per turn, each with a new optimizer and schedule."""
        job = self._job
        policy = StepPolicy(
            *(job, self._execution, self._params),
            make_optimizer_of(job, self._named, self._entrypoints),
            self._buffers,
            rates=ReportedRates(job.optimizer),
            numerics=self._numerics,
            num_steps=self._strategy.rounds,
            schedule=self._schedule(data),
        )
        turns = make_turns(job, self._entrypoints, self._passes, policy, self._named)
        for turn in turns:
            turn.policy.lower_rates(num_lr_reductions)
        must_divide, hooks = job.window.must_divide, self._callbacks
        return [LocalStep(turn, must_divide, hooks, protected) for turn in turns]

    def _step(
        self,
        local_steps: Sequence[LocalStep],
        round_num: int,
        pull: Callable[[], None],
        rows: Rows,
        key: Key,
    ) -> LocalReport:
        """Make one local step: one update, or one per turn."""
        self._execution.begin_batch(len(rows.indices))

        number, reports = int(key[-1]) + 1, []
        for local_step in local_steps:
            turn = local_step.turn
            if turn.number is not None:
                turn.begin(self._named)
            place = StepPlace(place_of(turn.policy, round_num - 1).lr_factor, rows.activity)
            window = Window(self._cuts(rows), key=_keys(key, turn))
            reports.append(local_step.run(rows, window, place, number, pull))
        turns = [local_step.turn for local_step in local_steps]
        return whole_local_step(turns, reports, len(rows.indices))


def _seen(number: int, rows: Rows, report: LocalReport) -> StepView:
    """Return the view of a client's step that on_step gets; steps count within the round."""
    counted = report.counted
    weight = 0.0 if report.is_skipped else counted.weight
    metrics = means(counted.logged)
    return StepView(number, counted.loss, weight, len(rows.indices), report.grad_norm, metrics)


def _keys(step: Key, turn: StepTurn) -> Callable[[int], Key]:
    """Return a function from a micro-batch's number to the key of its random numbers."""
    of_turn = (*step, "turn", *turn.key) if turn.key else step
    return lambda micro_batch: (*of_turn, micro_batch) if micro_batch else of_turn


def _no_rows(client: int, num_clients: int) -> InvalidInputError:
    return InvalidInputError.at("data.train", f"client {client} of {num_clients} has no rows")


# ---- Loss before the round ----
#
# The mean loss is that of a state over the training rows of one client, before it trains them. The
# model is in eval mode and nothing is differentiated. The rows are read in their order, in batches
# of the job's batch size, as an evaluation of the split reads them; so the loss is a function of
# the state and the rows alone, the same in whichever round it is measured.

_SPLIT = "train"


def loss_before(
    model: nn.Module, passes: Passes, data: Dataset, batch_size: int, check: Callable[[], None]
) -> float:
    """Return Σ mean loss · weight / Σ weight over all batches; NaN without weight.

    check: called before each batch, may raise to end. Raises InvalidInputError for rows that come
    as a stream.
    """
    if isinstance(data, StreamDataset):
        text = "needs training rows with a len(): a stream would be read once more in each round"
        raise InvalidInputError.at("strategy.options.q", text)
    evaluator = Evaluator(
        *(model, {_SPLIT: data}, passes.execution, passes.randomness, passes.gather),
        *(passes.objective, {}, batch_size),
    )
    model.eval()
    share = EvaluationShare((_SPLIT,), 0, 1, lambda _batch, _num_left: check(), {})
    total = weight = 0.0
    for part in evaluator.parts_of(share):
        total += part.sums["loss"]
        weight += part.weight
    return total / weight if weight else float("nan")
