"""The connection to a coordinator: calls that outlive it, in a loop of their own."""
