"""One session of a run on a worker: its context, control, states and outbox."""
