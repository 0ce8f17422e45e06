"""Seeds all generators that a user's code may draw from."""

import random

import numpy as np
import torch


def seed_all(key: int) -> None:
    """Seeds Python's, numpy's and torch's default generator."""
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key % 2**63)
    if torch.cuda.is_available():
        # Where there is none, torch keeps a stack trace of each call for when there will be one.
        torch.cuda.manual_seed_all(key % 2**63)
