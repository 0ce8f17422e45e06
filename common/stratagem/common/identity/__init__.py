"""Establishes identities: certificates, tokens, revocation, authentication, authorization."""
