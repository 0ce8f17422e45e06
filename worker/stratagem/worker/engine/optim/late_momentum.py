"""torch's SGD for parameters whose first gradients come in different steps.

A branch of a model that only some batches take gets its first gradient late. Its momentum then
begins with that gradient, as in torch's SGD of one tensor at a time; the kernel that does a whole
update at once wants all momenta or none, and raises.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

_PASSED = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class SGD(torch.optim.SGD):
    """Has the updates, bits and state of torch's."""

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        momentum_buffer_list: list[Tensor | None],
    ) -> bool:
        """Fills the lists with what is updated together; those that are late are updated here."""
        lists: tuple[list[Any], ...] = (params, grads, momentum_buffer_list)
        has_sparse = bool(super()._init_group(group, *lists))  # type: ignore[no-untyped-call]
        if not (group["fused"] and group["momentum"]):
            return has_sparse
        late = [i for i, momentum in enumerate(momentum_buffer_list) if momentum is None]
        others = [i for i, momentum in enumerate(momentum_buffer_list) if momentum is not None]
        if len(late) in (0, len(params)):
            return has_sparse
        own, own_grads, momenta = ([each[i] for i in late] for each in lists)
        further = {key: group[key] for key in _PASSED}
        sgd(own, own_grads, momenta, has_sparse, False, True, **further)
        for param, momentum in zip(own, momenta, strict=True):
            self.state[param]["momentum_buffer"] = momentum
        for each in lists:
            each[:] = [each[i] for i in others]
        return has_sparse
