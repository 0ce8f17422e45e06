"""One file per effect: how what is due gets done.

Each is an idempotent coroutine that ends by reporting a fact. None keeps anything in memory that
matters: after a crash the effect is pending again and is simply done again.
"""
