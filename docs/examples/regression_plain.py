"""Two heads on one trunk: how far a noisy pendulum swings, and whether it has stopped."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
time = torch.linspace(0, 8, 64)
swing, damping = torch.rand(3000, 1) + 0.5, torch.rand(3000, 1)
readings = swing * torch.exp(-damping * time) * torch.cos(3 * time) + 0.05 * torch.randn(3000, 64)
stopped = (swing * torch.exp(-damping * 8) < 0.05).float()
targets = torch.cat([swing, stopped], dim=1)
train_loader = DataLoader(TensorDataset(readings[:2500], targets[:2500]), batch_size=50, shuffle=True)
valid_loader = DataLoader(TensorDataset(readings[2500:], targets[2500:]), batch_size=100)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.swing, self.stopped = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, readings: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(readings)
        return self.swing(features), self.stopped(features)


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    swing, stopped = target.split(1, dim=1)
    return mse_loss(output[0], swing) + 0.1 * binary_cross_entropy_with_logits(output[1], stopped)


def error(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return (output[0] - target[:, :1]).abs()


net = TwoHeads()

optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(15):
    for inputs, target in train_loader:
        optimizer.zero_grad()
        loss(net(inputs), target).backward()
        optimizer.step()
with torch.no_grad():
    each = torch.cat([error(net(inputs), target) for inputs, target in valid_loader])
print("error", float(each.mean()))
