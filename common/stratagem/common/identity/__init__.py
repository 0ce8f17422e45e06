"""This package establishes identities by certificates and tokens, and authorizes callers."""
