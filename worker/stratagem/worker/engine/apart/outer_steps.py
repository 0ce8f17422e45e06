"""The outer steps of replicas: which fragment is cut or applied after which local step.

What travels with the last fragment, besides its parameters: changes of the model's buffers, which
are averaged as they are over shards, and sums over the local steps since it was cut before. Knows
no members and no coordinator.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.strategy import DataParallel
from stratagem.common.strategy.local_steps import Due, due_after, fragments_of
from stratagem.worker.engine.apart.local_model import LocalModel, LocalSums
from stratagem.worker.engine.apart.outer_fragment import OuterFragment
from stratagem.worker.engine.step.logged_sums import NUM_EXTRAS, LoggedSums, added, packed, unpacked
from stratagem.worker.engine.step.model_buffers import Buffers
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.exchange.buckets.step_scalars import StepScalars
from stratagem.worker.exchange.fragments import FragmentExchange

_NUM_NUMBERS = 3
"""Weight, sum of the loss, skipped steps."""


class JoinReport(NamedTuple):
    """What all members know after a step that has joined something."""

    numbers: dict[str, float]
    wait_s: float
    drifts: dict[int, float]
    """By own replica: how far it was from what all have in common, over the parameters of the
    fragments that were cut; empty where none was."""


@dataclass(slots=True)
class JoinedSums:
    """Sums over all replicas since a segment began; alike on all members."""

    weight: float = 0.0
    loss: float = 0.0
    num_skipped: int = 0
    max_grad_norm: float = 0.0
    logged: LoggedSums = field(default_factory=dict)


class OuterSteps:
    """Joins the replicas of this member with those of the others. Used by one thread."""

    def __init__(self, setup: Setup, replicas: Mapping[int, LocalModel], num_steps: int) -> None:
        """setup.model is what all replicas have in common; replicas: by number, in order.
        num_steps: of the whole job."""
        strategy, device = setup.job.strategy, setup.gather.device
        assert isinstance(strategy, DataParallel)
        self._replicas, self._options, self._num_steps = replicas, strategy.options, num_steps
        self._num_replicas = strategy.num_replicas
        self._buffers = Buffers(setup.model, device)
        self._own_buffers = {n: Buffers(each.model, device) for n, each in replicas.items()}
        self._num_logged = NUM_EXTRAS if setup.objective.may_log else 0
        sizes = [param.numel() for param in setup.model.parameters() if param.requires_grad]
        count = strategy.options.fragments
        if count > len(sizes):
            text = f"{count} is more than the {len(sizes)} parameters that are trained"
            raise InvalidInputError.at("strategy.options.fragments", text)
        num_rest = self._buffers.num_elements + _NUM_NUMBERS + self._num_replicas + self._num_logged
        self.fragments = [
            OuterFragment(setup, replicas, places, num_rest if index == count - 1 else 0)
            for index, places in enumerate(fragments_of(sizes, count))
        ]
        self._sums = JoinedSums()

    def after(self, exchange: FragmentExchange, step: int) -> JoinReport | None:
        """Cuts and applies what is due after so many local steps; None where nothing is. After an
        error the replicas are not to be used."""
        numbers: dict[str, float] = {}
        wait_s, drifts = 0.0, dict[int, float]()
        dues = due_after(step, self._options, self._num_steps)
        for due in dues:
            fragment = self.fragments[due.fragment]
            if due.is_cut:
                failpoint("worker.outer_step.before_exchange")
                fragment.cut(exchange.reducers[due.fragment], step, self._rests(due))
                for number, drift in fragment.drifts.items():
                    drifts[number] = math.hypot(drifts.get(number, 0.0), drift)
                continue
            if not fragment.is_in_flight:  # it was cut before this state began
                continue
            wait_s += self._arrive(due.fragment, step)
            numbers |= self._apply(due.fragment)
            failpoint("worker.outer_step.applied")
        return JoinReport(numbers, wait_s, drifts) if dues else None

    def _rests(self, due: Due) -> dict[int, Tensor]:
        if due.fragment < len(self.fragments) - 1:
            return dict.fromkeys(self._replicas, torch.zeros(0, dtype=torch.float64))
        return {number: self._rest(number, each) for number, each in self._replicas.items()}

    def _rest(self, number: int, replica: LocalModel) -> Tensor:
        own, replica.sums = replica.sums, LocalSums()
        changes = self._own_buffers[number].contribution(number, self._num_replicas)
        numbers = torch.zeros(_NUM_NUMBERS + self._num_replicas, dtype=torch.float64)
        numbers[:_NUM_NUMBERS] = torch.tensor(
            [own.weight, own.loss, own.num_skipped], dtype=torch.float64
        )
        numbers[_NUM_NUMBERS + number] = own.grad_norm
        return torch.cat([changes, numbers, *([packed(own.logged)] if self._num_logged else [])])

    def _arrive(self, index: int, step: int) -> float:
        """Waits for the sums of a fragment, and counts what has come with them, once."""
        fragment = self.fragments[index]
        is_new = fragment.sums is None
        wait_s = fragment.arrive(step)
        if is_new and index == len(self.fragments) - 1 and fragment.sums is not None:
            self._add(fragment.sums)
        return wait_s

    def _apply(self, index: int) -> dict[str, float]:
        """Updates what the replicas have in common; returns the numbers of it."""
        fragment = self.fragments[index]
        sums = fragment.sums
        assert sums is not None
        fragment.apply()
        numbers = {"outer_grad_norm": fragment.norm}
        if index < len(self.fragments) - 1:
            return numbers
        self._buffers.apply(sums.rest, self._num_replicas)
        self._buffers.snapshot()
        for own in self._own_buffers.values():
            own.take_over(self._buffers)
        weight, loss = sums.rest[self._buffers.num_elements :][:2].tolist()
        return {**numbers, **({"loss": loss / weight} if weight else {})}

    def _add(self, sums: StepScalars) -> None:
        so_far, first = self._sums, self._buffers.num_elements
        last = first + _NUM_NUMBERS + self._num_replicas
        weight, loss, num_skipped, *norms = sums.rest[first:last].tolist()
        so_far.weight += weight
        so_far.loss += loss
        so_far.num_skipped += round(num_skipped)
        so_far.max_grad_norm = max(so_far.max_grad_norm, *norms)
        if self._num_logged:
            so_far.logged = added(so_far.logged, unpacked(sums.rest[last:], None))

    def end_segment(self, step: int) -> JoinedSums:
        """Waits for what is under way, which is applied later; returns the sums since this was last
        asked."""
        for index in range(len(self.fragments)):
            self._arrive(index, step)
        sums, self._sums = self._sums, JoinedSums()
        return sums

    @property
    def outer_grad_norm(self) -> float:
        """The 2-norm of the newest outer gradient of all fragments."""
        return math.sqrt(math.fsum(fragment.norm**2 for fragment in self.fragments))

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors of all fragments, between two segments."""
        return {name: value for each in self.fragments for name, value in each.state().items()}

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Takes over what `state` gave; the models are loaded already."""
        for fragment in self.fragments:
            fragment.load(tensors, step)
        for buffers in (self._buffers, *self._own_buffers.values()):
            buffers.snapshot()
        self._sums = JoinedSums()
