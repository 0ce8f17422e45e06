"""Plans of a session: train, evaluate, build, or run one client's round."""
