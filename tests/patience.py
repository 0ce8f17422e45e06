"""How long tests wait for what happens at once."""

PATIENCE_S = 60.0
"""Ends only what hangs: a busy machine stands still for seconds. No test may measure by it."""

AT_ONCE_S = 20.0
"""What waits for nothing takes less on any machine; deadlines it must not wait for are longer."""
