"""What one session of a run holds and shows: its context, control, states and outbox."""
