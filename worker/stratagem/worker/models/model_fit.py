"""Tells errors about how a job fits its model from other wrong input: a site may pass them on."""

from collections.abc import Iterator
from contextlib import contextmanager

from stratagem.common.base.errors import InvalidInputError, UnfitModelError


@contextmanager
def checks_of_the_model() -> Iterator[None]:
    """Raise UnfitModelError for what is found wrong inside: by checks that look at nothing but the
    job and the names, types and shapes of its model."""
    try:
        yield
    except InvalidInputError as error:
        raise UnfitModelError(violations=error.violations) from None
