"""This package is the client library: blocking and asynchronous clients, transfers and checks of
jobs.
"""
