"""ddptrain: train deep networks on one or many GPUs, DDP first.

Run it: ``torchrun -m ddptrain recipe=mobilenet_cifar10`` (see the README).
"""

__version__ = "0.1.0"
