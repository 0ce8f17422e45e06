"""The noise of private rounds: the draw of the clients, and the noised mean."""
