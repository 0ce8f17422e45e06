"""The worker's end of a parameter server: payloads, transport and streams."""
