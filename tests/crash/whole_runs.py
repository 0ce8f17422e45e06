"""What runs that went on after a loss have in common."""

from stratagem.client.sdk.run_handle import RunHandle


def assert_nothing_was_trained_twice(run: RunHandle) -> None:
    """The party has not gone back to a commit, whose segments would be finished again."""
    finished = [each.payload["segment"] for each in run.events() if each.kind == "SegmentFinished"]
    assert finished == sorted({*finished})
    reasons = [each.payload["reason"] for each in run.events() if each.kind == "MembersFormed"]
    assert any("each slice of the state is left with one of them" in reason for reason in reasons)
