"""The numbers of activation transfers: tag = base + 2·micro-batch (+ 1 for a gradient), uint32.

The base is a function of the boundary between two stages and computed alike by both ends, so all
(boundary, micro-batch, direction) have tags of their own, also when two boundaries join the same
pair of workers. Numbers above those of all boundaries are for what is said once per step.
"""

from typing import Final

from stratagem.common.base.errors import InvalidInputError, LimitError

MAX_TAG: Final = 2**32 - 1
_MAX_WORD: Final = 2**64 - 1


def base_of(boundary: int, num_micro_batches: int) -> int:
    """The first tag of a boundary: boundary · 2 · M. Raises InvalidInputError below 0."""
    _not_negative("boundary", boundary)
    _not_negative("num_micro_batches", num_micro_batches)
    return boundary * 2 * num_micro_batches


def tag_of(base: int, micro_batch: int, *, backward: bool) -> int:
    """The tag of one transfer. Raises LimitError where a number does not fit, InvalidInputError for
    one below 0, whose tag would be another's."""
    _not_negative("base", base)
    _not_negative("micro_batch", micro_batch)
    direction = "backward" if backward else "forward"
    offset = 2 * micro_batch + int(backward)
    if offset > _MAX_WORD:
        raise LimitError(
            f"tag: {direction} offset of micro-batch {micro_batch} is beyond a 64-bit word"
        )
    if offset > MAX_TAG:
        raise LimitError(f"tag: {direction} offset of micro-batch {micro_batch} is beyond 32 bits")
    if base + offset > MAX_TAG:
        raise LimitError(
            f"tag: base {base} + {direction} offset of micro-batch {micro_batch} is beyond 32 bits"
        )
    return base + offset


def control_tag(num_boundaries: int, num_micro_batches: int, number: int) -> int:
    """The tag of message `number` among those that are sent once per step."""
    _not_negative("number", number)
    tag = base_of(num_boundaries, num_micro_batches) + number
    if tag > MAX_TAG:
        raise LimitError(
            f"tag: {num_boundaries} boundaries of {num_micro_batches} micro-batches leave no "
            "number below 2^32 for the step itself"
        )
    return tag


def _not_negative(name: str, value: int) -> None:
    if value < 0:
        raise InvalidInputError.at(f"tag.{name}", f"{value} is below 0")
