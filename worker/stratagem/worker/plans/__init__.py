"""One module per kind of plan: train, evaluate, build, one client's round."""
