"""For all tests: hypothesis must not take a busy machine for a slow function."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
