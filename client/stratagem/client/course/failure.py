"""How far a run has come that failed, in words that are the same wherever they are read."""

import re
from typing import Final

_STEP: Final = re.compile(r"training step (\d{1,18})")


def failed_step(activity: str) -> int | None:
    """Return the step that an error was raised in, which its activity names; None: in none."""
    found = _STEP.search(activity)
    return int(found[1]) if found else None


def failure_text(committed: int, activity: str = "", reached: int = 0, of: int = 0) -> str:
    """Return "committed to step 40 of 100; failed in step 47".

    committed: steps that the newest commit has. activity: of the error, as it has journaled what it
    was raised in. reached: the newest step that was told of, where it is known. of: steps that the
    run was to have.
    """
    steps = f"{committed:,} of {of:,}" if of else f"{committed:,}"
    begin = f"committed to step {steps}" if committed else "no step committed"
    step = failed_step(activity)
    if step is not None:
        return f"{begin}; failed in step {step:,}"
    return f"{begin}; failed after step {reached:,}" if reached > committed else begin
