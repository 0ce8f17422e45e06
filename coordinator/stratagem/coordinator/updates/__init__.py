"""Updates of clients are received, spooled (kept in files), checked and folded into the next state.
A fold reads all updates of a round together, in windows: ranges of elements of one type."""
