"""The average of a model's parameters over the steps of a run: exponential, or their mean.

A pure function of the parameters after each applied step, so every member of a party that holds the
same parameters holds the same average. Has a state; must not know where it is kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, WeightAverageSpec

AVERAGE: Final = "average/"
"""Before the names of the averaged parameters in a state."""
_NUM_AVERAGED: Final = "num_averaged"
State = tuple[dict[str, Tensor], dict[str, str]]
"""(tensors by name, metadata)."""


class WeightAverage:
    """The average of these parameters, in their own dtype; nothing before its first update.

    It has the bits of torch.optim.swa_utils.AveragedModel with the same averages. Buffers are not
    averaged: a model of averaged parameters has those of the present model. Used by one thread.
    """

    def __init__(self, spec: WeightAverageSpec, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        """params: what is averaged, by the names that it has in a state."""
        self._spec, self._params = spec, list(params)
        self._means: list[Tensor] = []
        self._num_averaged = 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the parameters after the applied step `step` (from 1), if one is due."""
        if not self._spec.is_due(step):
            return
        if self._num_averaged == 0:
            self._means = [param.detach().clone() for _, param in self._params]
        else:
            weight = self._spec.weight(self._num_averaged)
            for mean, (_, param) in zip(self._means, self._params, strict=True):
                mean.lerp_(param, weight)
        self._num_averaged += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average in the place of the parameters for a while, if there is one."""
        if not self._means:
            yield
            return
        live = [param.detach().clone() for _, param in self._params]
        self._write(self._means)
        try:
            yield
        finally:
            self._write(live)

    def state(self, names: Iterable[str] | None = None) -> State:
        """Returns (live tensors by name, metadata); nothing before the first update.

        names: of the parameters whose averages are wanted; all of them unless given.
        """
        if not self._means:
            return {}, {}
        wanted = None if names is None else {*names}
        named = zip(self._params, self._means, strict=True)
        tensors = {
            f"{AVERAGE}{name}": mean
            for (name, _), mean in named
            if wanted is None or name in wanted
        }
        return tensors, {f"{AVERAGE}{_NUM_AVERAGED}": str(self._num_averaged)}

    def load(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Takes over what `state` gave; a state without an average has had no update."""
        self._num_averaged = int(metadata.get(f"{AVERAGE}{_NUM_AVERAGED}", "0"))
        self._means = []
        if self._num_averaged:
            self._means = [_copy_of(f"{AVERAGE}{n}", p, tensors) for n, p in self._params]

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for (_, param), value in zip(self._params, values, strict=True):
            param.copy_(value)


def average_of(job: JobSpec, params: Sequence[tuple[str, nn.Parameter]]) -> WeightAverage | None:
    """Returns the average of these parameters that the job asks for, if it does."""
    return None if job.weight_average is None else WeightAverage(job.weight_average, params)


def evaluated(job: JobSpec, average: WeightAverage | None) -> AbstractContextManager[None]:
    """Returns the time in which the parameters are those that the job has evaluated."""
    if average is None or job.evaluation is None or job.evaluation.of != "average":
        return nullcontext()
    return average.in_place()


def _copy_of(name: str, param: nn.Parameter, tensors: Mapping[str, Tensor]) -> Tensor:
    given = tensors.get(name)
    if given is None or (given.shape, given.dtype) != (param.shape, param.dtype):
        found = "missing" if given is None else f"is {given.dtype} {tuple(given.shape)}"
        text = f"{found}; the parameter is {param.dtype} {tuple(param.shape)}"
        raise InvalidInputError.at(f"state.{name}", text)
    return torch.empty_like(param, requires_grad=False).copy_(given)
