"""One coordinator and one worker for all attacks, and what must hold when they are over."""

from collections.abc import Iterator

import pytest

from tests.hostile.promises import methods
from tests.hostile.rig import Rig, calm_runs, nothing_left_behind, under_attack
from tests.hostile.samples import samples


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Undisturbed runs go on behind all tests; that nothing is left behind is checked last."""
    with under_attack(tmp_path_factory.mktemp("hostile")) as attacked:
        valid = samples(attacked.target)
        for each in methods():  # whatever a valid call leaves behind is there now
            attacked.say(each, [message.SerializeToString() for message in valid[each.name]])
        with nothing_left_behind(attacked), calm_runs(attacked, pause_s=1.0):
            yield attacked
