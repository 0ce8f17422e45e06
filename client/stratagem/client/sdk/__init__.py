"""This package is the client library: blocking and asynchronous clients, transfers, checks of jobs,
and the code that travels with jobs.
"""
