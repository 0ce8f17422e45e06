"""This package computes the cost of differentially private rounds and draws their noise from a
secret key, and holds the arithmetic and cryptography of secure aggregation.
"""
