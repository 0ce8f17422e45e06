"""The noise of private rounds: its secret, the draw of the clients, and the noised mean."""
