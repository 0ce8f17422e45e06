"""The health check of containers: `python -m stratagem.common.health HOST:PORT`."""
