"""Numbers as sentences say them."""

import pytest

from stratagem.common.base.wording import beyond_text


@pytest.mark.parametrize(
    ("value", "limit", "said"),
    [
        (4.254, 4.0, "4.25"),
        (4.001174, 4.0, "4.001"),
        (4.000000000000001, 4.0, "4.000000000000001"),
        (0.50000004, 0.5, "0.50000004"),
        (3.994, 4.0, "3.99"),
    ],
)
def test_what_is_beyond_a_limit_is_said_to_be(value: float, limit: float, said: str) -> None:
    assert beyond_text(value, limit) == said
