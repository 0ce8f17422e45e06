"""Amounts of bytes as text."""

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.sizes import size_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("512MiB", 512 << 20), ("1.5k", 1500), ("7", 7), ("2 Ti", 2 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text, "memory") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 GBs", "0", "0.1B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="memory"):
        size_bytes(text, "memory")
