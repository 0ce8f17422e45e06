"""Checks that an update may be accepted: it has the layout of the run, and finite values.

Checks the data while they stream by, so that no second pass is needed. A client that fails is
rejected alone, with a sentence that says why. Knows nothing of files or rounds.
"""

from collections.abc import Callable

import google_crc32c
import numpy as np

from stratagem.common.base.errors import StratagemError
from stratagem.common.tensors.manifest import Manifest, TensorSpec, dtype_named
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.updates.numpy_floats import Raw, is_finite, storage


class UpdateRejectedError(StratagemError):
    """This update cannot enter the round; `reason` is the sentence to show."""

    def __init__(self, cause: Cause, reason: str) -> None:
        self.cause, self.reason = cause, reason
        super().__init__(reason)


def check_layout(given: Manifest, expected: Manifest) -> None:
    """Check names, shapes, types and order against the run's; the error gives the first difference.

    May be called before the first byte is pulled: the layout is in the manifest.
    """
    ours, theirs = expected.stored(), given.stored()
    for index, (want, have) in enumerate(zip(ours, theirs, strict=False)):
        if have.name != want.name:
            raise UpdateRejectedError(
                Cause.LAYOUT, f"tensor {index} is {have.name!r}, expected {want.name!r}"
            )
        for what, value, allowed in (
            ("shape", have.shape, want.shape),
            ("dtype", have.dtype, want.dtype),
        ):
            if value != allowed:
                raise UpdateRejectedError(
                    Cause.LAYOUT, f"{want.name!r} has {what} {value}, expected {allowed}"
                )
    if len(theirs) != len(ours):
        longer, problem = (ours, "is missing") if len(ours) > len(theirs) else (theirs, "is extra")
        name = longer[min(len(ours), len(theirs))].name
        raise UpdateRejectedError(
            Cause.LAYOUT, f"{len(theirs)} tensors, expected {len(ours)}: {name!r} {problem}"
        )
    if _aliases(given) != _aliases(expected):
        raise UpdateRejectedError(
            Cause.LAYOUT, "other tensors share their storage than in the run's model"
        )


def _aliases(manifest: Manifest) -> dict[str, str]:
    return {
        tensor.name: tensor.alias_of for tensor in manifest.tensors if tensor.alias_of is not None
    }


Before = Callable[[TensorSpec, int, int], Raw | None]
"""(tensor, offset in it, number of bytes) -> bytes of the state that an update began from; None for
a tensor that is not there."""


def check_finite(spec: TensorSpec, values: Raw, before: Raw | None = None) -> None:
    """Raise UpdateRejectedError where values of a floating tensor are not finite, unless they have
    the bits that they had `before`: a mask of infinities is no fault of the client's."""
    if is_finite(spec.dtype, values):
        return
    if before is not None:
        bits = np.dtype(f"u{values.itemsize}")
        values = values[values.view(bits) != before.view(bits)]
    if before is None or not is_finite(spec.dtype, values):
        raise UpdateRejectedError(Cause.NOT_FINITE, f"values of {spec.name!r} are not finite")


class DataCheck:
    """The running check of a manifest's data, which it sees in order, in pieces of any size, once.

    before: asked where values are not finite.
    """

    def __init__(self, manifest: Manifest, before: Before | None = None) -> None:
        self._before = before
        self.crc32c = 0
        self.num_bytes = 0
        self._specs = [spec for spec in manifest.stored() if spec.size_bytes]
        self._index = 0
        self._split_element = b""  # the first bytes of an element that two pieces share

    def see(self, data: memoryview) -> None:
        """Take the next piece. Raises UpdateRejectedError where a value is not finite."""
        self.crc32c = google_crc32c.extend(self.crc32c, np.frombuffer(data, np.uint8))
        while data:
            spec = self._specs[self._index]
            part = data[: spec.offset + spec.size_bytes - self.num_bytes]
            if dtype_named(spec.dtype).is_floating:
                self._check(spec, part, self.num_bytes - spec.offset)
            data = data[len(part) :]
            self.num_bytes += len(part)
            self._index += self.num_bytes == spec.offset + spec.size_bytes

    def _check(self, spec: TensorSpec, part: memoryview, offset: int) -> None:
        """offset: of the part in the tensor."""
        item_bytes = dtype_named(spec.dtype).item_bytes
        if self._split_element:
            begin = offset - len(self._split_element)
            num_missing = item_bytes - len(self._split_element)
            joined = self._split_element + bytes(part[:num_missing])
            part, offset = part[num_missing:], offset + num_missing
            self._split_element = b""
            self._check(spec, memoryview(joined), begin)
        num_whole = len(part) - len(part) % item_bytes
        self._check_whole(spec, np.frombuffer(part[:num_whole], storage(spec.dtype)), offset)
        if part[num_whole:]:
            self._split_element = bytes(part[num_whole:])

    def _check_whole(self, spec: TensorSpec, values: Raw, offset: int) -> None:
        if self._before is None or is_finite(spec.dtype, values):
            check_finite(spec, values)
            return
        check_finite(spec, values, self._before(spec, offset, values.nbytes))
