"""The audit that a site keeps: lines that are linked by hashes."""
