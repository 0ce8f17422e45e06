"""The causes for which an update of a federated client does not count in a round."""

from enum import StrEnum


class Cause(StrEnum):
    """The cause for which an update of a federated client does not count; few, as they are labels
    of a metric."""

    NOT_FINITE = "not_finite"
    """Values of the update are not finite, or it is empty because every step was left out."""
    NOT_FINITE_LOSS = "not_finite_loss"
    """The loss of a step, or its gradients, are not finite."""
    LAYOUT = "layout"
    """Tensor names, shapes, types or aliases differ from those of the run's model."""
    SIZE = "size"
    """The update has more bytes than were announced, or than the model has."""
    CODEC = "codec"
    """The update cannot be decoded, or its codec cannot represent it."""
    NUM_SAMPLES = "num_samples"
    EXCEPTION = "exception"
    """The client's data or code raised an exception."""
    MEMORY = "memory"
    CRASHED = "crashed"
    """Training the client has ended process after process."""
    TIMEOUT = "timeout"
    """The client's data or code raised TimeoutError."""
    REFUSED_BY_SITE = "refused_by_site"
    """The client's worker does not allow an entry point that the job names."""
    OUTSIDE_WINDOW = "outside_window"
    """The client's site takes part at certain times only, and this is none of them: no failure."""
    BUDGET = "budget"
    """The privacy budget of the client's rows is spent: no failure."""
    KEYS_LOST = "keys_lost"
    """The client no longer has its keys of a secure round: its worker was restarted."""
    ABSENT = "absent"
    """The client's worker was not there when the keys of a secure round were exchanged."""
    LATE = "late"
    """The round was closed without the client; never journaled."""
    UNKNOWN = "unknown"
    """No cause is recorded: the fact was journaled by a version that had none."""

    @property
    def is_of_the_job(self) -> bool:
        """True when another run of the job would fail in the same way: machines have no part in
        it."""
        machines = (
            *(Cause.MEMORY, Cause.CRASHED, Cause.TIMEOUT),
            *(Cause.KEYS_LOST, Cause.ABSENT),
        )
        return self not in machines and self is not Cause.OUTSIDE_WINDOW

    @property
    def is_refusal(self) -> bool:
        """True when the client's site was not willing, and may have another mind later."""
        return self in (Cause.REFUSED_BY_SITE, Cause.OUTSIDE_WINDOW)

    @property
    def is_fault(self) -> bool:
        """True when the client's data, code or machine has failed; False when it was not willing,
        came too late, or nothing is known."""
        unwilling = (Cause.REFUSED_BY_SITE, Cause.OUTSIDE_WINDOW, Cause.BUDGET)
        no_fault = (*unwilling, Cause.KEYS_LOST, Cause.ABSENT)
        return self not in (*no_fault, Cause.LATE, Cause.UNKNOWN)
