"""The check of an update as it streams by."""

import numpy as np
import pytest

from stratagem.common.tensors.manifest import Purpose, build_manifest
from stratagem.coordinator.updates.update_checks import DataCheck, UpdateRejectedError


@pytest.mark.parametrize("cut", [1, 4, 7, 16])
def test_what_was_not_finite_before_may_stay_so_and_nothing_else(cut: int) -> None:
    """A mask of infinities is a buffer of the model's; whatever pieces it comes in."""
    before = np.array([-np.inf, 1.0, np.nan, 2.0], "<f4")
    manifest = build_manifest([("mask", "float32", (4,))], Purpose.UPDATE)
    known = before.view(np.uint8)

    def see(values: list[float]) -> None:
        check = DataCheck(manifest, lambda _, offset, num: known[offset : offset + num])
        data = memoryview(np.array(values, "<f4").tobytes())
        for start in range(0, len(data), cut):
            check.see(data[start : start + cut])

    see([-np.inf, 3.0, np.nan, 2.0])
    for wrong in ([np.inf, 1.0, np.nan, 2.0], [-np.inf, np.nan, np.nan, 2.0]):
        with pytest.raises(UpdateRejectedError, match="not finite"):
            see(wrong)
