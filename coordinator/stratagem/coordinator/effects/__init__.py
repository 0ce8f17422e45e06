"""One file per effect: how what is due gets done."""
