"""Rules of jobs about what the clients of a federation do."""
