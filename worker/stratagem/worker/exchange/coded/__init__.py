"""Gradient compression: coding shards on host or device, and all-gather of what is coded."""
