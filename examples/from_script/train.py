"""A training script in plain PyTorch, as people have them: digits, shifted at random."""

import random

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset[tuple[Tensor, int]]):
    def __init__(self, rows: slice, *, shift: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[rows] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels, self.shift = labels[rows].tolist(), shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = self.images[row]
        if self.shift:
            image = torch.roll(image, (random.randint(-1, 1), random.randint(-1, 1)), (1, 2))
        return image, self.labels[row]


def make_model() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(16 * 36, 10))


def make_data() -> tuple[Digits, Digits]:
    return Digits(slice(0, 1400), shift=True), Digits(slice(1400, None), shift=False)


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    train, test = make_data()
    model, loss_of = make_model(), nn.CrossEntropyLoss(label_smoothing=0.05)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.003)
    loader = DataLoader(train, batch_size=50, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * len(loader))
    for epoch in range(8):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(test, 100))
        print(f"epoch {epoch + 1}: accuracy {int(right) / len(test):.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
