"""Why a client of a federation does not count in a round."""

from enum import StrEnum


class Cause(StrEnum):
    """Why an update of a federated client does not count; few, as they are labels of a metric."""

    NOT_FINITE = "not_finite"
    """Values of the update; or there is nothing to it, as every step was left out."""
    NOT_FINITE_LOSS = "not_finite_loss"
    """The loss of a step, or its gradients."""
    LAYOUT = "layout"
    """Other names, shapes, types or aliases than the run's model has."""
    SIZE = "size"
    """More bytes than were announced, or than the model has."""
    CODEC = "codec"
    """What cannot be decoded, or what its codec cannot hold."""
    NUM_SAMPLES = "num_samples"
    EXCEPTION = "exception"
    """The client's data or code has raised."""
    MEMORY = "memory"
    CRASHED = "crashed"
    """It has ended process after process."""
    TIMEOUT = "timeout"
    """What the client's data or code waited for did not come (TimeoutError)."""
    REFUSED_BY_SITE = "refused_by_site"
    """Its worker does not allow what the job names."""
    LATE = "late"
    """Its round has been closed without it; never journaled."""
    UNKNOWN = "unknown"
    """As journaled by versions that did not say."""

    @property
    def is_of_the_job(self) -> bool:
        """Whether another run of the job would come to the same: machines have no part in it."""
        return self not in (Cause.MEMORY, Cause.CRASHED, Cause.TIMEOUT)
