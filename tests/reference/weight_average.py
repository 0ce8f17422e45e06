"""What "correct" means for averages of parameters: torch's own, over lists of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from stratagem.common.job import WeightAverageSpec


class RunningAverage:
    """The average of some parameters; empty where there is nothing to average."""

    def __init__(self, spec: WeightAverageSpec | None, params: list[nn.Parameter]) -> None:
        self._spec, self._params = spec, params
        self._means: list[Tensor] = []
        self._num_averaged = 0

    def update(self, step: int) -> None:
        """Takes in the parameters after a step that was applied."""
        spec = self._spec
        if spec is None or step < spec.start_step or (step - spec.start_step) % spec.every != 0:
            return
        live = [param.detach() for param in self._params]
        if self._num_averaged == 0:
            self._means = [tensor.clone() for tensor in live]
        elif spec.kind == "ema":
            decay = 0.999 if spec.decay is None else spec.decay
            get_ema_multi_avg_fn(decay)(self._means, live, self._num_averaged)
        else:
            get_swa_multi_avg_fn()(self._means, live, self._num_averaged)
        self._num_averaged += 1

    def copied(self, params: list[nn.Parameter]) -> RunningAverage:
        """The same average, which goes on with other parameters."""
        other = RunningAverage(self._spec, params)
        other._means = [mean.clone() for mean in self._means]
        other._num_averaged = self._num_averaged
        return other

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """The state_dict with averages for parameters, under all names of each."""
        pairs = zip(self._params, self._means, strict=False)
        means = {param.data_ptr(): mean for param, mean in pairs}
        if not means:
            return {}
        return {name: means.get(t.data_ptr(), t) for name, t in model.state_dict().items()}


class GlobalAverage:
    """The average of a global model over rounds, in float64 and rounded once to the stored type."""

    def __init__(self, spec: WeightAverageSpec | None, trained: Collection[str]) -> None:
        self._spec, self._trained = spec, trained
        self._means: dict[str, Tensor] = {}
        self._num_averaged = 0

    def update(self, round_num: int, world: Mapping[str, Tensor]) -> None:
        """Takes in the global model after a round."""
        spec = self._spec
        if (
            spec is None
            or round_num < spec.start_step
            or (round_num - spec.start_step) % spec.every
        ):
            return
        weight = 1.0 / (self._num_averaged + 1)
        if spec.kind == "ema":
            weight = 1.0 - (0.999 if spec.decay is None else spec.decay)
        for name in self._trained:
            new = world[name]
            mean = self._means.get(name, new).double()
            between = mean + weight * (new.double() - mean)
            self._means[name] = between.to(new.dtype) if self._num_averaged else new.clone()
        self._num_averaged += 1

    def state(self, world: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model with averages for parameters; empty before the first."""
        return {**world, **self._means} if self._means else {}
