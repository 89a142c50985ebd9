"""Handwritten digits by a small convolutional network (pip install scikit-learn)."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=50, shuffle=True)
valid_loader = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=297)

net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
)  # fmt: skip


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float()


optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for _ in range(8):
    for inputs, target in train_loader:
        optimizer.zero_grad()
        cross_entropy(net(inputs), target).backward()
        optimizer.step()
with torch.no_grad():
    each = torch.cat([accuracy(net(inputs), target) for inputs, target in valid_loader])
print("accuracy", float(each.mean()))
