"""Measures what the steps of a trainer cost. The only place of phase training with a clock."""

import time

import torch

from stratagem.worker.phases.phase_schedule import TrainingPhase
from stratagem.worker.phases.phase_training import PhaseTraining


class PassTimer:
    """Seconds of one step after the other; hands them to the phases when a step has ended."""

    def __init__(self, device: torch.device, *, is_idle: bool) -> None:
        """Waits for the device where that is needed to separate the passes, unless is_idle: then
        no times are needed."""
        self._device, self._is_idle = device, is_idle
        self._is_backward = False
        self._step_began_s = self._mark_s = 0.0
        self._forward_s = self._backward_s = 0.0

    def begin_step(self) -> None:
        self._step_began_s = time.perf_counter()
        self._forward_s = self._backward_s = 0.0

    def begin_passes(self) -> None:
        """Starts the passes of a shard: forward and backward in turn, once for each of its
        micro-batches."""
        self._mark_s = time.perf_counter()
        self._is_backward = False

    def begin_backward(self) -> None:
        """Ends a forward pass and starts the backward."""
        if not self._is_idle and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._pass(is_backward=True)

    def begin_forward(self) -> None:
        """Starts a further micro-batch."""
        self._pass(is_backward=False)

    def end_passes(self) -> None:
        self._pass(is_backward=False)

    def _pass(self, *, is_backward: bool) -> None:
        if self._is_idle:
            return
        now_s = time.perf_counter()
        if self._is_backward:
            self._backward_s += now_s - self._mark_s
        else:
            self._forward_s += now_s - self._mark_s
        self._mark_s, self._is_backward = now_s, is_backward

    def end_exact_step(self, phases: PhaseTraining | None, phase: str) -> None:
        if phases is not None:
            phases.seconds = phases.seconds.with_exact(
                TrainingPhase(phase),
                forward=self._forward_s,
                backward=self._backward_s,
                whole=time.perf_counter() - self._step_began_s,
            )

    def end_predicted_step(self, phases: PhaseTraining) -> None:
        phases.seconds = phases.seconds.with_predicted(time.perf_counter() - self._step_began_s)
