"""Tasks of the event loop: one for each pending effect, chores, and groups that end together."""
