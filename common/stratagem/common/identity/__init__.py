"""Who is who: certificates, tokens, revocation, authentication, authorization."""
