"""How many updates become one state: exact, in a fixed order, window by window."""
