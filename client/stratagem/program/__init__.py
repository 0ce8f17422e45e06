"""The program `stratagem`, also as `python -m stratagem.program`."""
