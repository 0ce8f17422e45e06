"""What runs that went on after a loss have in common."""

from stratagem.client.sdk.run_handle import RunHandle


def assert_nothing_was_trained_twice(run: RunHandle, *, was_training: bool = True) -> None:
    """The party has not gone back to a commit, whose segments would be finished again.

    was_training: it certainly had steps to take when it lost a member, and was formed again."""
    finished = [each.payload["segment"] for each in run.events() if each.kind == "SegmentFinished"]
    assert finished == sorted({*finished})
    reasons = [each.payload["reason"] for each in run.events() if each.kind == "MembersFormed"]
    if was_training or len(reasons) > 1:
        assert any("each slice of the state is left with one of them" in each for each in reasons)
