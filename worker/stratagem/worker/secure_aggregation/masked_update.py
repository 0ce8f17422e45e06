"""Makes of a client's change a masked update: whole numbers that say nothing without the others'.

    Δ = w - w_global, of all floating elements; a change that is not finite is refused
    y = rint(clip(Δ) · s) · weight + self mask + Σ pair masks     modulo 2^32 or 2^64

Integers and bools of the model do not leave. Memory beside the update is a window.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stratagem.common.base.errors import UserCodeError
from stratagem.common.secure.masks import MASKED, Floats, MaskedLayout, apply_mask
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.worker.secure_aggregation.secure_client import Masking

_WINDOW: Final = 1 << 18
"""Elements that are quantised at once."""


@dataclass(frozen=True, slots=True)
class MaskedUpdate:
    """The only tensor of the update, and its SHA-256."""

    tensors: Mapping[str, Tensor]
    digest: str


def masked_update(
    base: Mapping[str, Tensor], trained: Mapping[str, Tensor], masking: Masking, weight: int
) -> MaskedUpdate:
    """Return the masked change from `base` to `trained`. Raises UserCodeError, as training does,
    where it is not finite."""
    model, _ = manifest_of(trained, Purpose.UPDATE)
    layout, rule = MaskedLayout(model), masking.rule
    words = np.empty(layout.num_elements + 1, rule.word)
    words[-1] = weight
    for spec, first in layout.tensors():
        before, after = base[spec.name].flatten(), trained[spec.name].flatten()
        for start in range(0, after.numel(), _WINDOW):
            part = slice(start, min(start + _WINDOW, after.numel()))
            change = _change(spec.name, before[part], after[part])
            rule.quantise(change, weight, words[first + part.start : first + part.stop])
    for key, is_subtracted in masking.masks:
        apply_mask(key, 0, words, subtract=is_subtracted)
    signed = torch.from_numpy(words.view(f"<i{rule.word.itemsize}"))
    return MaskedUpdate({MASKED: signed}, hashlib.sha256(words.data).hexdigest())


def _change(name: str, before: Tensor, after: Tensor) -> Floats:
    """Return the change in float64; zero where the bits are equal, also of what is not finite."""
    before, after = before.detach().cpu(), after.detach().cpu()
    difference = torch.where(after == before, 0.0, after.double() - before.double())
    if not bool(torch.isfinite(difference).all()):
        text = f"the change of {name.removeprefix('model/')!r} is not finite"
        raise UserCodeError("FloatingPointError", text, activity="masking the update")
    change: Floats = difference.numpy()
    return change
