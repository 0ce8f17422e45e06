"""What a user would write: models with tensors and modules of kinds that are seldom met.

All take the rows of `data.classes` and give one logit for each class.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.userland.models import NUM_CLASSES, NUM_FEATURES

NUM_ROWS = 50


def _words(x: Tensor) -> Tensor:
    """Three words of each row."""
    return (x[:, :3] * 10).abs().long() % NUM_ROWS


class Odd(nn.Module):
    """A hidden layer and a head; each kind below adds something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, 8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(x))
        return logits


class Embedded(Odd):
    def __init__(self, sparse: bool = True, bag: bool = False, is_used: bool = True) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.words = kind(NUM_ROWS, 8, sparse=sparse)
        self.unused = nn.Embedding(7, 3, sparse=sparse)
        self.is_used = is_used

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if not self.is_used:
            return hidden
        found = self.words(_words(x))
        return hidden + (found if found.dim() == 2 else found.mean(1))


class FunctionalSparse(Odd):
    """Asks for sparse gradients where no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(NUM_ROWS, 8) / 4)

    def hidden(self, x: Tensor) -> Tensor:
        found = nn.functional.embedding(_words(x), self.table, sparse=True)
        return super().hidden(x) + found.mean(1)


class SparseParameter(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.eye(8).to_sparse())

    def hidden(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.mask, super().hidden(x).t()).t()


class ComplexParameter(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.polar(torch.ones(8), torch.arange(8.0)))

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden * (self.wave * (1 + 2j)).real


class ComplexBuffer(Odd):
    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        wave = torch.polar(torch.ones(8), torch.arange(8.0))
        self.register_buffer("wave", wave, persistent=persistent)

    def hidden(self, x: Tensor) -> Tensor:
        wave = self.get_buffer("wave")
        return super().hidden(x) * (wave * (1 + 2j)).real


class Shapes(Odd):
    """Parameters of no dimension, of no element, and not contiguous."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.scale: nn.Parameter
        if which == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.5))
        elif which == "empty":
            self.scale = nn.Parameter(torch.zeros(0, 8))
        elif which == "strided":
            self.scale = nn.Parameter(torch.randn(8, 8).t())
        elif which == "expanded":
            self.scale = nn.Parameter(torch.randn(8, 1).expand(8, 8))
        elif which == "overlapping":
            self.scale = nn.Parameter(torch.randn(15).unfold(0, 8, 1))
        elif which == "channels_last":
            self.scale = nn.Parameter(torch.randn(2, 4, 1, 1))
            self.conv = nn.Conv2d(2, 4, 2)
            weight = self.conv.weight.detach().contiguous(memory_format=torch.channels_last)
            self.conv.weight = nn.Parameter(weight)
        elif which == "view":
            self.scale = nn.Parameter(torch.randn(20, 8)[3:11])
        elif which == "shared":
            base = torch.randn(16, 8)
            self.scale = nn.Parameter(base[:8])
            self.other = nn.Parameter(base[4:12])

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        match self.which:
            case "scalar":
                return hidden * self.scale
            case "empty":
                return hidden + self.scale.sum(0)
            case "channels_last":
                return hidden + self.conv(hidden.view(-1, 2, 2, 2)).sum((2, 3)).repeat(1, 2)
            case "shared":
                return hidden @ self.scale + hidden @ self.other
            case _:
                return hidden @ self.scale


class Buffered(Odd):
    """Buffers of other types than floats, which change in training."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.flags: Any
        if which == "bool":
            self.register_buffer("flags", torch.zeros(8, dtype=torch.bool))
        elif which == "int64":
            self.register_buffer("flags", torch.tensor([2**40 + 1, 3]))
        elif which == "uint8":
            self.register_buffer("flags", torch.tensor([250, 3], dtype=torch.uint8))
        elif which == "empty":
            self.register_buffer("flags", torch.zeros(0, 3))
        elif which == "strided":
            self.register_buffer("flags", torch.randn(8, 3).t())
        elif which == "expanded":
            self.register_buffer("flags", torch.ones(1, 1).expand(2, 8))
        elif which == "refilled":
            self.register_buffer("flags", torch.zeros(8))
        elif which == "grows":
            self.register_buffer("flags", torch.zeros(0))
        elif which == "none":
            self.register_buffer("flags", None)
        else:
            self.register_buffer("flags", torch.zeros(8), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if not self.training:
            return hidden
        with torch.no_grad():
            match self.which:
                case "bool":
                    self.flags |= hidden.mean(0) > 0.1
                case "int64" | "uint8":
                    self.flags += 1
                case "strided":
                    self.flags += hidden.mean(0)
                case "refilled":
                    self.flags.fill_(-torch.inf)
                case "grows":
                    self.flags = torch.cat([self.flags, hidden.mean().view(1)])
                case "none":
                    self.flags = hidden.mean(0)
                case "scratch":
                    self.flags += hidden.mean(0)
        return hidden


class Unused(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)


class Branches(Odd):
    """Two branches, of which each batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return self.left(hidden) if float(x.sum()) > 0 else self.right(hidden)


class Thawing(Odd):
    """Freezes and thaws in training."""

    def __init__(self, which: str = "freeze") -> None:
        super().__init__()
        self.which = which
        self.middle = nn.Linear(8, 8)
        self.middle.requires_grad_(which == "freeze")
        self.num_passes = 0

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_passes += 1
            if self.num_passes == 3:
                self.middle.requires_grad_(self.which != "freeze")
        return self.middle(super().hidden(x))


class Replacing(Odd):
    """Puts another parameter in the place of one, or adds one, in training."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.middle = nn.Linear(8, 8)
        self.num_passes = 0

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_passes += 1
            if self.num_passes == 3:
                if self.which == "replace":
                    self.middle.weight = nn.Parameter(self.middle.weight.detach().clone())
                else:
                    self.extra = nn.Parameter(torch.ones(8))
        return self.middle(super().hidden(x))


def parametrized(which: str) -> nn.Module:
    model = Odd()
    match which:
        case "spectral":
            parametrizations.spectral_norm(model.layer)
        case "weight":
            parametrizations.weight_norm(model.layer)
        case "orthogonal":
            parametrizations.orthogonal(model.layer)
        case "old_spectral":
            nn.utils.spectral_norm(model.layer)
    return model


def lazy(is_made: bool = False) -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(NUM_CLASSES))
    if is_made:
        model(torch.zeros(2, NUM_FEATURES))
    return model


def lazy_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 5))


class WithExtraState(Odd):
    def __init__(self, is_tensor: bool = False) -> None:
        super().__init__()
        self.is_tensor, self.count = is_tensor, 0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.count) if self.is_tensor else {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state) if self.is_tensor else state["count"]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, NUM_CLASSES)
    )


class Twice(Odd):
    """Two forwards of the same layer before the one backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x + 1)


class BackwardInside(Odd):
    """A backward pass of its own inside the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            super().forward(x).square().mean().backward()
        return super().forward(x)


class PenaltyInside(Odd):
    """A gradient of its own inside the forward pass, as gradient penalties take it."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if self.training:
            (grad,) = torch.autograd.grad(
                logits.square().mean(), [self.layer.weight], create_graph=True
            )
            logits = logits + grad.square().sum()
        return logits


class DictOut(Odd):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "note": "a word"}


class Hooked(Odd):
    """Has a hook on the gradient of a parameter, from its constructor on."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.raises = raises
        self.layer.weight.register_hook(self._hook)

    def _hook(self, grad: Tensor) -> Tensor:
        if self.raises:
            raise RuntimeError("the hook is torn")
        return 0.5 * grad


def dict_loss(out: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out["logits"], target)


class OddRows:
    """Rows that hold a string or None."""

    def __init__(self, which: str, num_rows: int = 50) -> None:
        self.which, self.num_rows = which, num_rows
        self.x = torch.randn(num_rows, NUM_FEATURES, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Any:
        note = "a word" if self.which == "string" else None
        return {"x": self.x[row], "note": note}, int(self.x[row, :NUM_CLASSES].argmax())


def odd_rows(which: str) -> dict[str, Any]:
    return {"train": OddRows(which), "test": OddRows(which, 23)}


class DictIn(Odd):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["x"])


MARKS: dict[str, Any] = {}
"""The mark of a parameter of `marked`, and the devices it was made on."""


def marked() -> nn.Module:
    layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)
    setattr(layer.weight, "is_tp", MARKS["mark"])  # noqa: B010
    MARKS["devices"].append(layer.weight.device)
    return nn.Sequential(layer)
