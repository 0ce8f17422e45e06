"""Which errors of a plan are the job's, and end its run, and which are tried again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.host.device_faults import DeviceHealth
from stratagem.worker.plans.plan_errors import typed_errors

WORK: Any = SimpleNamespace(
    host=SimpleNamespace(health=DeviceHealth()), holding=SimpleNamespace(activity="training")
)


def test_what_torch_refuses_to_compute_is_the_jobs_wherever_it_was_called() -> None:
    dense, sparse = torch.zeros(2, 2), torch.eye(2).to_sparse()
    with (
        pytest.raises(UserCodeError, match="between dense and sparse") as caught,
        typed_errors(WORK),
    ):
        torch._foreach_copy_([dense], [sparse])
    assert (caught.value.type, caught.value.activity) == ("RuntimeError", "training")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), torch.distributed.DistError("a peer is gone")],
    ids=str,
)
def test_what_another_time_or_place_can_mend_is_none_of_the_jobs(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as caught, typed_errors(WORK):
        raise error
    assert caught.value is error
