"""A network that knows the digits 0 to 4 learns 5 to 9 from few examples (pip install scikit-learn)."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
known, new = labels < 5, labels >= 5
trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
first = nn.Sequential(trunk, nn.Linear(32, 5))
optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
for _ in range(60):  # what pretrained weights stand for
    optimizer.zero_grad()
    cross_entropy(first(images[known]), labels[known]).backward()
    optimizer.step()

few, others = images[new], labels[new] - 5
train_loader = DataLoader(TensorDataset(few[:200], others[:200]), batch_size=20, shuffle=True)
valid_loader = DataLoader(TensorDataset(few[200:], others[200:]), batch_size=100)
net = nn.Sequential(trunk, nn.Linear(32, 5))
trunk[0].requires_grad_(False)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float()


optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for _ in range(20):
    for inputs, target in train_loader:
        optimizer.zero_grad()
        cross_entropy(net(inputs), target).backward()
        optimizer.step()
with torch.no_grad():
    each = torch.cat([accuracy(net(inputs), target) for inputs, target in valid_loader])
print("accuracy", float(each.mean()))
