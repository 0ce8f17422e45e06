"""Population-based training has members that copy better ones, their donors, and vary
hyperparameters.
"""
