"""What a user would write: models that jobs of the tests name, and that only compute."""

import os.path as borrowed_module
from os import getcwd as borrowed
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_FEATURES, NUM_CLASSES, NUM_WORDS = 12, 5, 12

__all__ = ["borrowed", "borrowed_module"]


def mlp(hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, NUM_CLASSES))


def tower(width: int = 8, depth: int = 1, dropout: float = 0.0) -> nn.Module:
    """Its layout depends on two of the arguments; the third may change at any time."""
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(width if number else NUM_FEATURES, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(width, NUM_CLASSES))


class InDtype(nn.Module):
    """Gives its input another dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def in_dtypes(dtypes: list[str], hidden: int = 16, *, casts_rows: bool = True) -> nn.Module:
    """Layers in these dtypes, one after the other; each begins with a cast, the first if wanted."""
    sizes = [NUM_FEATURES, *[hidden] * (len(dtypes) - 1), NUM_CLASSES]
    layers: list[nn.Module] = []
    for number, dtype in enumerate(dtypes):
        layers += [InDtype(dtype)] if number or casts_rows else []
        inside, outside = sizes[number : number + 2]
        layers.append(nn.Linear(inside, outside, dtype=getattr(torch, dtype)))
        layers += [nn.Tanh()] if number + 1 < len(dtypes) else []
    return nn.Sequential(*layers)


def dropout_mlp(hidden: int = 16, dropout: float = 0.4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, NUM_CLASSES),
    )


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)
    )


def two_norms() -> nn.Module:
    """Buffers of two widths between layers, of which the middle one is frozen."""
    middle = nn.Linear(16, 16).requires_grad_(False)
    first = [nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh()]
    return nn.Sequential(*first, middle, nn.BatchNorm1d(16), nn.Linear(16, NUM_CLASSES))


def wide(width: int) -> nn.Module:
    """One wide layer: an update that is spooled in more than one piece."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, width, bias=False), nn.Linear(width, NUM_CLASSES, bias=False)
    )


def deep(dropout: float = 0.3) -> nn.Module:
    """Eight nodes: linear, in-place, dropout, batch norm."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 16),
        nn.Dropout(dropout),
        nn.Tanh(),
        nn.LayerNorm(16),
        nn.Linear(16, NUM_CLASSES),
    )


def tall() -> nn.Module:
    """32 nodes of the same size, and a small one."""
    layers = [nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Tanh()) for _ in range(32)]
    return nn.Sequential(*layers, nn.Linear(NUM_FEATURES, NUM_CLASSES))


def heavy() -> nn.Module:
    """Eight layers of 256 KiB each."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(nn.Linear(NUM_FEATURES, 256), *layers, nn.Linear(256, NUM_CLASSES))


class Everything(nn.Module):
    """Frozen, unused and tied parameters, noise of its own, a constant buffer."""

    mask: Tensor
    seen: Tensor
    scratch: Tensor

    def __init__(self, mask: float) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.last = nn.Linear(8, NUM_CLASSES)
        self.register_buffer("mask", torch.full((8,), mask).clamp(max=0.0))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.mean()
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        hidden = self.frozen(hidden) * self.scratch + self.mask.exp()
        return self.last(self.b(torch.relu(self.a(hidden))))


def everything() -> nn.Module:
    """With infinities in the constant buffer."""
    return Everything(-torch.inf)


class Block(nn.Module):
    """Dropout twice; checkpointed, it computes its forward again inside backward and must draw the
    same numbers then."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.is_checkpointed = is_checkpointed

    def body(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.linear(self.drop(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


def shared_blocks(is_checkpointed: bool) -> nn.Module:
    shared = Block(is_checkpointed)
    return nn.Sequential(shared, shared, nn.Linear(NUM_FEATURES, NUM_CLASSES))


def checkpointed() -> nn.Module:
    return nn.Sequential(Block(True), Block(True), nn.Linear(NUM_FEATURES, NUM_CLASSES))


def shaped(
    width: int = 4,
    depth: int = 1,
    dropout: float = 0.0,
    activation: str = "tanh",
    is_frozen: bool = False,
    is_tied: bool = False,
    has_buffer: bool = False,
    reads_values: bool = False,
) -> nn.Module:
    """Some arguments decide what the state is made of."""
    if reads_values:
        dropout = float(torch.linspace(0, dropout, 3).tolist()[-1])
    if not isinstance(depth, int):
        raise ValueError(f"depth {depth!r} is no number")
    layers: list[nn.Module] = [nn.Linear(NUM_FEATURES, width)]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU() if activation == "relu" else nn.Tanh()]
    twin = nn.Linear(width, width)
    if is_tied:
        assert isinstance(layers[1], nn.Linear)
        twin.weight = layers[1].weight
    layers[0].requires_grad_(not is_frozen)
    model = nn.Sequential(*layers, twin, nn.Dropout(dropout), nn.Linear(width, NUM_CLASSES))
    if has_buffer:
        model.register_buffer("seen", torch.zeros(()))
    return model


class HiddenTable(nn.Module):
    """Keeps a tensor that is no part of its state: it cannot be built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.table = torch.linspace(0.5, 1.5, NUM_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.table)


def reads_values() -> nn.Module:
    model = mlp()
    assert float(next(model.parameters()).detach().abs().sum()) > 0
    return model


class LastOfSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(len(x), 4, 3))[0][:, -1])


class Recurrent(nn.Module):
    """The last output of a recurrent layer, or of its cell in a loop, over four times three
    numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        own = {} if kind.endswith("Cell") else {"batch_first": True}
        self.recurrent = getattr(nn, kind)(3, 8, **own)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unflatten(1, (4, 3))
        if isinstance(self.recurrent, nn.RNNBase):
            return self.head(self.recurrent(steps)[0][:, -1])
        state = None
        for step in steps.unbind(1):
            state = self.recurrent(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def recurrent(kind: str) -> nn.Module:
    return Recurrent(kind)


def token_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(NUM_WORDS, 8), nn.Tanh(), nn.Linear(8, NUM_WORDS))


class Rare(nn.Module):
    """Computes nothing in float16 or under autocast, and has no way back in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        is_low = torch.is_autocast_enabled("cpu") or x.dtype == torch.float16
        if is_low or (x.dtype == torch.bfloat16 and torch.is_grad_enabled()):
            raise RuntimeError("no primitive for Rare. Set VERBOSE=all to hear more.")
        return x * 1


def rare() -> nn.Module:
    return nn.Sequential(Rare(), nn.Linear(NUM_FEATURES, NUM_CLASSES), Rare())


def known_rare() -> nn.Module:
    """Whose layer is a kind that this device has no primitives for in 16 bits."""
    # Readers of rows have these models beside their data, and no engine.
    from stratagem.worker.numerics.precision import KINDS, LayerKind

    KINDS["Rare"] = LayerKind(Rare, Rare, ((2, NUM_FEATURES),))
    return nn.Sequential(Rare(), nn.Linear(NUM_FEATURES, NUM_CLASSES))


class BigBuffer(nn.Module):
    table: Tensor

    def __init__(self, change: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.change = change
        self.register_buffer("table", torch.zeros(1 << 19))

    def forward(self, x: Tensor) -> Tensor:
        if self.change:
            self.table += 1
        return self.linear(x)


class CountsEvaluations(nn.Module):
    """Keeps how many batches it was evaluated on, in a buffer that is committed, and what is
    scratch in one that is not."""

    calls: Tensor

    def __init__(self, is_kept: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.register_buffer("calls", torch.tensor(float("nan")), persistent=is_kept)
        self.register_buffer("constant", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.calls = self.calls.nan_to_num() + 1
            self.get_buffer("constant").copy_(torch.zeros(3))
        return self.body(x)


class CountingLayers(nn.Module):
    """A forward of its own over repeated layers, which count their calls in what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(NUM_FEATURES, 8)
        self.layers = nn.ModuleList(Counting() for _ in range(3))
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for index, layer in enumerate(self.layers):
            hidden = hidden + layer(nn.functional.dropout(hidden, 0.1, self.training), scale=index)
        return self.head(hidden)


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: int) -> Tensor:
        if self.training:
            self.calls += 1
        return self.body(x) * (scale + 1 / (1 + self.calls))


def counting_layers() -> nn.Module:
    return CountingLayers()


class Overwrite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


def overwriting() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), Overwrite(), nn.Linear(8, NUM_CLASSES))


class Unembed(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def tied(copies: int = 2) -> nn.Module:
    """An embedding whose weight is used again, once or twice."""
    embed = nn.Embedding(NUM_FEATURES, 16)
    middle = [nn.Linear(16, 16), nn.Tanh()]
    if copies == 3:
        middle += [Unembed(embed), nn.Linear(NUM_FEATURES, 16), nn.Tanh()]
    return nn.Sequential(embed, *middle, Unembed(embed))


class InARow(nn.Module):
    """Not an nn.Sequential, but its children are called in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, NUM_CLASSES)
        self.body = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh())
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.last = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.first(x))


class Both(nn.Module):
    """Answers a dict with another layout, an integer and a bool inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, 16)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.linear(x)
        return {"wide": hidden.view(-1, 4, 4).transpose(1, 2), "mask": hidden > 0, "n": (len(x),)}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, given: dict[str, Any]) -> Tensor:
        wide = self.linear(given["wide"]).flatten(1)
        return self.head(wide * given["mask"]) / given["n"][0]


def structured() -> nn.Module:
    return nn.Sequential(Both(), Join())


def shared_block() -> nn.Module:
    block = nn.Linear(NUM_FEATURES, NUM_FEATURES)
    return nn.Sequential(block, nn.Tanh(), block, nn.Linear(NUM_FEATURES, NUM_CLASSES))


def frozen_start() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16).requires_grad_(False),
        nn.Tanh(),
        nn.Linear(16, NUM_CLASSES),
    )


def wide_middle(width: int = 512, *, frozen: bool = False) -> nn.Module:
    """The layer in the middle has a megabyte, so as states are cut it is a leaf of its own."""
    first, middle = nn.Linear(NUM_FEATURES, width), nn.Linear(width, width)
    if frozen:
        middle.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), nn.Linear(width, NUM_CLASSES))


class FunctionalDropout(nn.Module):
    """Draws in its own forward, so from the key that is in force when the batch has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, batch: Any) -> Tensor:
        x = batch["x"] + batch["jitter"] if isinstance(batch, dict) else batch
        out: Tensor = self.inner(nn.functional.dropout(x, 0.3, self.training))
        return out


class SometimesNoisy(nn.Module):
    """Draws in every mode, but for some batches only, and changes its input. One of its modules has
    a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = FunctionalDropout(), FunctionalDropout()
        self.first.register_forward_pre_hook(lambda _, args: args)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.first(x) + self.second(x)
        if x.sum() > 0:
            mixed = mixed + torch.randn_like(mixed)
        x.zero_()
        return mixed


def with_sparse_buffer(*, persistent: bool) -> nn.Module:
    """Has a buffer without a storage of its own, which is part of the state or is not."""
    model = mlp()
    model.register_buffer("links", torch.eye(3).to_sparse(), persistent=persistent)
    return model
