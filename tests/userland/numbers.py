"""A data set of a user's. Apart: a process that reads it imports this module, and nothing more."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)
