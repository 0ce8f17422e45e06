"""The fold of a round: the mean of its updates, and how the server moves its parameters by it."""
