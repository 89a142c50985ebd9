"""Which pixels belong to a disc? Pictures are drawn by a Dataset of one's own."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Discs(Dataset[tuple[Tensor, Tensor]]):
    """Noisy pictures (1, 64, 64), and the class of each pixel, int64 (64, 64)."""

    def __init__(self, count: int, seed: int) -> None:
        self.places = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y, radius = 64 * self.places[index]
        rows, columns = torch.arange(64)[:, None], torch.arange(64)
        inside = (rows - y) ** 2 + (columns - x) ** 2 < (4 + radius / 4) ** 2
        return inside.float()[None] + torch.randn(1, 64, 64), inside.long()


train_loader = DataLoader(Discs(600, seed=1), batch_size=20, shuffle=True)
valid_loader = DataLoader(Discs(100, seed=2), batch_size=20)
net = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 2, 1)
)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float()


optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for _ in range(3):
    for inputs, target in train_loader:
        optimizer.zero_grad()
        cross_entropy(net(inputs), target).backward()
        optimizer.step()
with torch.no_grad():
    each = torch.cat([accuracy(net(inputs), target) for inputs, target in valid_loader])
print("accuracy", float(each.mean()))
