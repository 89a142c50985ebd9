"""One thread for every test: several would fight over the cores of a small, busy machine."""

import torch

torch.set_num_threads(1)
