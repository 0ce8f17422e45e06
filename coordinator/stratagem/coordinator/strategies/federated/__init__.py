"""Federated averaging trains a model in rounds of clients. Its terms are:

client  a holder of rows, on which a worker trains for it
roster  the clients of a run; clients may join and leave an open roster
helper  the worker that builds the model and evaluates
late    of a client: training on for a round that was closed without it
bench   clients that failed too often sit on it, and are not asked for some rounds
silo    a client that is a party of several workers
region  a client that is a federation of its own
"""
