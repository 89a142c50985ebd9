"""A character LSTM on the source of Python's own library."""

import inspect
import textwrap

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
text = torch.tensor(list(inspect.getsource(textwrap).encode("ascii", "replace")))
windows = text[: len(text) // 33 * 33].view(-1, 33)
parts = windows[: len(windows) * 9 // 10], windows[len(windows) * 9 // 10 :]
train_set, valid_set = (TensorDataset(part[:, :-1], part[:, 1:]) for part in parts)
train_loader = DataLoader(train_set, batch_size=20, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=20)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        self.lstm = nn.LSTM(64, 96, batch_first=True)
        self.head = nn.Linear(96, 128)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits (n, 128, length)."""
        output: Tensor = self.head(self.lstm(self.embedding(characters))[0])
        return output.transpose(1, 2)


def bits(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="none") / torch.tensor(2.0).log()


net = LanguageModel()

optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for _ in range(8):
    for inputs, target in train_loader:
        optimizer.zero_grad()
        cross_entropy(net(inputs), target).backward()
        optimizer.step()
with torch.no_grad():
    each = torch.cat([bits(net(inputs), target) for inputs, target in valid_loader])
print("bits", float(each.mean()))
