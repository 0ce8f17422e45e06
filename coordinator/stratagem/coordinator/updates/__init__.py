"""Updates of clients: received, spooled, checked and folded into the next state."""
