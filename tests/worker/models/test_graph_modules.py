"""The modules that a graph may name, against what is said of them."""

from typing import Any

import pytest
from torch import nn

from stratagem.common.job.nested import WITHOUT_PARAMETERS
from stratagem.worker.models.build import MODULES

CALLS: tuple[tuple[Any, ...], ...] = (
    *((), (1,), (2,), (1, 2), (1, 2, 1), (1, 2, 2), (0.5,), (0.1, 20), (1, (2, 1)), (2, 1)),
    *((2, 1, 4), ([1, 0],)),
)


def _instance(name: str) -> nn.Module:
    """The module, made of ones and twos; the first arguments that it takes."""
    for arguments in CALLS:
        try:
            return MODULES[name](*arguments)
        except (TypeError, ValueError, AssertionError, RuntimeError, ZeroDivisionError):
            continue
    raise AssertionError(f"no arguments for {name}")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_what_is_said_to_have_no_parameters_has_none(name: str) -> None:
    has_parameters = any(p.requires_grad for p in _instance(name).parameters())
    never_affine = {"InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"}  # unless asked to be
    assert has_parameters is (name not in WITHOUT_PARAMETERS | never_affine)
