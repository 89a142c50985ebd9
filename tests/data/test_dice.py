"""Draws that follow from who asks."""

import torch

from ddptrain.api.rng import derive_seed, draw, draw_below


def splitmix64(state: int) -> int:
    """The reference, as written in C at https://prng.di.unimi.it/splitmix64.c, one output."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_one_key_is_splitmix64() -> None:
    # first output for seed 1234567 as published with the algorithm (rosettacode.org, Splitmix64)
    assert splitmix64(1234567) == 6457827717110365317
    assert derive_seed(1234567) == 6457827717110365317 >> 1


def test_tensors_hash_as_python_numbers_do() -> None:
    ids = torch.tensor([0, 1, 2**40, 77])
    epochs = torch.tensor([0, 3, 1, 2**33])
    for seed, purpose in ((0, 0), (2**62, 4)):
        expected = []
        for epoch, i in zip(epochs.tolist(), ids.tolist(), strict=True):
            state = splitmix64((epoch + derive_seed(seed, purpose)) % 2**64)
            expected.append(splitmix64((state + i) % 2**64) >> 32 & 0x7FFFFFFF)
        assert draw(seed, epochs, ids, purpose).tolist() == expected


def test_a_draw_does_not_depend_on_its_batch() -> None:
    ids, epochs = torch.arange(1000), torch.full((1000,), 3)
    together = draw(5, epochs, ids, 1)
    assert torch.equal(together[[7, 500]], draw(5, epochs[:2], ids[[7, 500]], 1))


def test_draws_are_even_and_apart() -> None:
    ids, epochs = torch.arange(90_000), torch.zeros(90_000, dtype=torch.int64)
    counts = torch.bincount(draw_below(9, 0, epochs, ids, 0), minlength=9)
    # 10,000 expected in each cell; 5 standard deviations of a binomial are 471
    assert (counts - 10_000).abs().max() < 471
    pairs = draw_below(2, 0, epochs, ids, 0) * 2 + draw_below(2, 0, epochs, ids, 1)
    assert (torch.bincount(pairs) - 22_500).abs().max() < 650
