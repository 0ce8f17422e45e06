"""The table of the kinds of tensors and modules that are seldom met: which are trained exactly, and
by which sentence the others are refused."""

from dataclasses import dataclass, field
from typing import Any

_ODD = "tests.userland.odd_models:"
_NOT_ONES_OWN = "has several elements in one place of memory"
_WHEN_FROZEN = "in training; the parameters that are trained are chosen when the model is made"


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, with other sections of its job; refused: a part of the sentence, if it is."""

    name: str
    model: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    sections: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def entrypoint(self) -> dict[str, Any]:
        """The model as a job names it."""
        return {"entrypoint": f"{_ODD}{self.model}", "kwargs": self.kwargs}


def _each(model: str, names: str, **refused: str) -> list[Kind]:
    """The kinds of a model that is told which one it is."""
    return [
        Kind(f"{model} {name}", model, {"which": name}, refused.get(name, ""))
        for name in names.split()
    ]


def _rows(which: str) -> dict[str, Any]:
    return {"entrypoint": f"{_ODD}odd_rows", "kwargs": {"which": which}}


BUILT = [
    Kind("sparse parameter", "SparseParameter", refused='parameter "mask" is a tensor of layout'),
    Kind("complex parameter", "ComplexParameter", refused='parameter "wave" is of complex64; allo'),
    Kind(
        "complex buffer", "ComplexBuffer", refused=r'state_dict\(\)\["wave"\] is of complex64; all'
    ),
    *_each("Shapes", "expanded overlapping", expanded=_NOT_ONES_OWN, overlapping=_NOT_ONES_OWN),
    *_each("Shapes", "shared", shared='parameters "scale" and "other" are different ones in the'),
    *_each("Buffered", "expanded", expanded=_NOT_ONES_OWN),
    Kind("lazy", "lazy", refused=r'module "0" \(LazyLinear\) has parameters without a shape'),
    Kind("lazy norm", "lazy_norm", refused=r'module "1" \(LazyBatchNorm1d\) has parameters'),
    Kind("extra state", "WithExtraState", refused='"_extra_state"] is a dict, from get_extra_st'),
    Kind(
        "LBFGS",
        "Odd",
        refused="makes a LBFGS, whose step computes the loss itself",
        sections={"optimizer": {"entrypoint": "tests.userland.optimizers:lbfgs", "lr": 0.1}},
    ),
]
"""Refused when the model is built."""

TRAINED = [
    Kind("sparse function", "FunctionalSparse", refused='parameter "table" got a gradient of lay'),
    *_each("Buffered", "grows none", grows="changed its shape", none='"flags" came into the state'),
    *_each("Thawing", "freeze thaw", freeze=f"frozen {_WHEN_FROZEN}", thaw=_WHEN_FROZEN),
    *_each("Replacing", "replace add", replace="was replaced by another ten", add=_WHEN_FROZEN),
    Kind(
        "extra tensor", "WithExtraState", {"is_tensor": True}, "which get_extra_state returns, ch"
    ),
    Kind("hook that raises", "Hooked", {"raises": True}, "the hook is torn"),
    Kind("dict", "DictOut", refused=r"cross_entropy got outputs \{"),
    Kind("strings", "DictIn", {}, "holds a str", {"data": _rows("string")}),
    Kind("nothing", "DictIn", {}, "found <class 'NoneType'>", {"data": _rows("none")}),
]
"""Refused in the first step, or with the first state that is saved."""

EXACT = [
    Kind("sparse embedding", "Embedded"),
    Kind("sparse bag", "Embedded", {"bag": True}),
    Kind("sparse embedding that is unused", "Embedded", {"is_used": False}),
    Kind("complex scratch", "ComplexBuffer", {"persistent": False}),
    *_each("Shapes", "scalar empty strided channels_last view"),
    *_each("Buffered", "bool int64 uint8 empty strided scratch"),
    Kind("unused", "Unused"),
    Kind("branches", "Branches"),
    *_each("parametrized", "spectral weight orthogonal old_spectral"),
    Kind("lazy that has seen rows", "lazy", {"is_made": True}),
    Kind(
        "batch norm",
        "normed",
        sections={
            "data": {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 48}}
        },
    ),
    Kind("two forwards", "Twice"),
    Kind("gradient penalty", "PenaltyInside"),
    Kind("hook on a gradient", "Hooked"),
    Kind("dict and a loss for it", "DictOut", sections={"loss": f"{_ODD}dict_loss"}),
]
"""Equal to their reference loops to the bit."""
