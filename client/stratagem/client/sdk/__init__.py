"""The client library: blocking and asynchronous clients, transfers, views."""
