"""Models whose parameters cannot be gathered layer by layer."""

import torch
from torch import Tensor, nn

from tests.userland.models import NUM_CLASSES, NUM_FEATURES


class Peeking(nn.Sequential):
    """Reads a weight of its second layer when that has been called already."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]
        layer = self[1]
        assert isinstance(layer, nn.Linear)
        return output + 0.1 * layer.weight.square().sum()


class PeekingAtTheEnd(Peeking):
    """Does so in evaluations only."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            output: Tensor = nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]
            return output
        return super().forward(x)


class Giving(nn.Linear):
    """Computes nothing: its output is its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


class Borrowing(nn.Sequential):
    """Computes with what its second layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self[1](x)
        output: Tensor = self[0](x) @ weight.T
        return output


def reads_in_evaluations() -> nn.Module:
    return PeekingAtTheEnd(nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES))


def gives_a_weight() -> nn.Module:
    return Borrowing(nn.Linear(NUM_FEATURES, 8), Giving(8, NUM_CLASSES, bias=False))


def reads_elsewhere() -> nn.Module:
    return Peeking(nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES))


class Clamped(nn.Linear):
    """Changes its own weight in place in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def writes_itself() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), Clamped(8, NUM_CLASSES))


class Outside(nn.Sequential):
    """Has a parameter beside its layers, and changes it in place."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self[0], self[1]):
            x = layer(x)
        scaled = x * self.scale
        with torch.no_grad():
            self.scale.mul_(0.5)
        return scaled


def writes_outside() -> nn.Module:
    return Outside(nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES))


class Echo(nn.Linear):
    """Has its weight as a buffer, too: what is not trained, of the same memory."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("seen", self.weight.data)


def shares_with_what_is_frozen(width: int = 400) -> nn.Module:
    """Trained weights, of several slices each, whose memory a frozen parameter and a buffer have,
    too."""
    trained, frozen = nn.Linear(width, width), nn.Linear(width, width)
    frozen.weight = nn.Parameter(trained.weight.data, requires_grad=False)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, width),
        frozen,
        nn.Tanh(),
        trained,
        Echo(width),
        nn.Linear(width, NUM_CLASSES),
    )


def lies_in_one_storage() -> nn.Module:
    """Parameters that lie one after the other in one storage, as those of an LSTM on a GPU."""
    layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)
    size = layer.weight.numel()
    flat = torch.cat([layer.weight.data.view(-1), layer.bias.data])
    layer.weight.data = flat[:size].view(layer.weight.shape)
    layer.bias.data = flat[size:]
    return layer


class Hollow(nn.Linear):
    """Has a parameter without elements beside its own."""

    def __init__(self) -> None:
        super().__init__(8, NUM_CLASSES)
        self.hollow = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.hollow.sum()


def hollow() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), Hollow())
