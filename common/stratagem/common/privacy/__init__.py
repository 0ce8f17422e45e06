"""This package computes the cost of differentially private rounds, and draws their noise from a
secret key. The coordinator adds noise for clients with it, and the worker for rows.
"""
