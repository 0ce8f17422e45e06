"""A character language model on text that comes with Python: the topics of its `help()`.

Plain functions of the user's, as in digits.py. The model is a row of modules, so that model
parallelism can cut it between any two: embed, block0, block1, ..., head.
"""

from collections import OrderedDict
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CODES = 128
"""ASCII; what lies beyond is read as code 0."""


class Embed(nn.Module):
    """Codes (rows, time) -> (rows, time, width), with learned positions."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(NUM_CODES, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, codes: Tensor) -> Tensor:
        embedded: Tensor = self.codes(codes) + self.positions[: codes.shape[1]]
        return embedded


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each around a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, width = x.shape
        heads = self.qkv(self.norm(x)).view(rows, time, 3 * self.num_heads, -1).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, time, width))
        mixed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return mixed


def build_model(
    width: int = 64, num_blocks: int = 2, num_heads: int = 4, context: int = 64
) -> nn.Module:
    """Codes (rows, time) -> logits of the next code (rows, time, NUM_CODES)."""
    blocks = {f"block{i}": Block(width, num_heads) for i in range(num_blocks)}
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_CODES))
    return nn.Sequential(OrderedDict(embed=Embed(width, context), **blocks, head=head))


def load(context: int = 64, num_chars: int = 200_000) -> dict[str, tuple[Tensor, Tensor]]:
    """Windows of the text and the same windows one character on; the last tenth is for testing."""
    text = "\n".join(topics[name] for name in sorted(topics))[:num_chars]
    codes = torch.tensor([ord(c) if ord(c) < NUM_CODES else 0 for c in text])
    num_rows = (len(codes) - 1) // context
    x = codes[: num_rows * context].view(num_rows, context)
    y = codes[1 : num_rows * context + 1].view(num_rows, context)
    num_test = max(1, num_rows // 10)
    return {"train": (x[:-num_test], y[:-num_test]), "test": (x[-num_test:], y[-num_test:])}
