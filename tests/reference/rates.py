"""The learning rate of each step of a plain loop: a curve of ours, or the user's own scheduler on
the optimizer itself."""

import warnings
from typing import Any

import torch

from stratagem.common.job import JobSpec
from stratagem.worker.engine.apply_step import learning_rate_factor, set_learning_rates
from stratagem.worker.user_code.entrypoints import EntryPoints


class Rates:
    """Sets the rates before each step, and steps the user's scheduler after it."""

    def __init__(
        self,
        job: JobSpec,
        optimizer: torch.optim.Optimizer,
        num_steps: int,
        entrypoints: EntryPoints,
        behind: int = 0,
    ) -> None:
        """behind: the steps that were made with other values; the scheduler makes them anew."""
        self._job, self._optimizer, self._num_steps = job, optimizer, num_steps
        self._scheduler: Any = None
        schedule = job.optimizer.schedule
        if schedule is not None and schedule.entrypoint is not None:
            make = entrypoints.bind(schedule.entrypoint, schedule.kwargs or {}, "schedule")
            for group in optimizer.param_groups:
                del group["initial_lr"]  # which schedulers would take for their own
            self._scheduler = make(optimizer, num_steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # steps of a scheduler without any of its optimizer
            for _ in range(behind):
                self.after()

    def before(self, step: int) -> None:
        if self._scheduler is None:
            factor = learning_rate_factor(self._job.optimizer, step, self._num_steps)
            set_learning_rates(self._optimizer, factor)

    def after(self) -> None:
        if self._scheduler is not None:
            self._scheduler.step()
