"""Updates of clients are received, spooled, checked and folded into the next state."""
