"""The language models: what they know of the past, how they start, and what they write."""

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import SMALL, language_model, write_text
from torch import Tensor, nn

from ddptrain.api.recipe import Progress
from ddptrain.api.world import World
from ddptrain.data.text.data import Windows
from ddptrain.recipes.attention import rotated, rotation
from ddptrain.recipes.ngrams import NgramEmbedding
from ddptrain.recipes.recurrent import RecurrentModel
from ddptrain.recipes.text import LanguageModelling, continuation
from ddptrain.recipes.transformer import TransformerModel

WINDOW = 24
VOCABULARY = 50


def made(name: str, window: int = WINDOW, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {**SMALL, **changes}
    if name == "transformer":
        return TransformerModel(VOCABULARY, window, heads=2, **settings).eval()
    return RecurrentModel(VOCABULARY, cell=name, **settings).eval()  # type: ignore[arg-type]


def tokens(rows: int = 3, length: int = WINDOW) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


MODELS = ["lstm", "gru", "rnn", "transformer"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [[1] * WINDOW, [5, 1, 7, 11], [23, 1]])
def test_a_text_read_in_pieces_is_understood_as_one_read_whole(name: str, cuts: list[int]) -> None:
    model, text = made(name), tokens()
    whole, _ = model(text)
    state, parts = None, []
    for piece in text.split(cuts, dim=1):
        logits, state = model(piece, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_no_token_sees_what_follows_it(name: str) -> None:
    model, text = made(name), tokens()
    changed = text.clone()
    changed[:, 15] = (changed[:, 15] + 1) % VOCABULARY
    before, after = model(text)[0], model(changed)[0]
    assert torch.equal(before[:, :15], after[:, :15])
    assert (before[:, 15:] != after[:, 15:]).any(dim=-1).all()


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [7, 20, 13]])
def test_a_transformer_looks_back_one_window_and_no_further(cuts: list[int]) -> None:
    """With one layer, whose reach is the window; the n-grams look back two more."""
    model, text = made("transformer", window=8, layers=1), tokens(length=40)
    changed = text.clone()
    changed[:, 10] = (changed[:, 10] + 1) % VOCABULARY

    def read(of: Tensor) -> Tensor:
        state, parts = None, []
        for piece in of.split(cuts, dim=1):
            logits, state = model(piece, state)
            parts.append(logits)
        return torch.cat(parts, dim=1)

    differs = ~torch.isclose(read(text), read(changed), rtol=1e-4, atol=1e-6).all(dim=-1).all(dim=0)
    assert differs[10 : 10 + 8 + 2].all()
    assert not differs[:10].any()
    assert not differs[10 + 8 + 2 :].any()


def test_a_transformers_memory_does_not_grow_beyond_its_window() -> None:
    model = made("transformer", window=8)
    _, state = model(tokens(length=40))
    assert {value.shape[2] for name, value in state.items() if name.startswith(("keys", "values"))} == {7}


@given(shift=st.integers(0, 10_000), first=st.integers(0, 50), second=st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_rotary_positions_matter_by_their_distance_only(shift: int, first: int, second: int) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=draw, dtype=torch.float64)

    def product(a: int, b: int) -> Tensor:
        turned = [
            rotated(x, rotation(place + 1, 16, torch.device("cpu"))) for x, place in ((query, a), (key, b))
        ]
        return (turned[0] * turned[1]).sum()

    moved = product(first + shift, second + shift)
    torch.testing.assert_close(moved, product(first, second), rtol=0, atol=5e-3)  # angles are float32
    torch.testing.assert_close(product(first, first), (query * key).sum(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "gates"), [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_recurrent_matrices_start_orthogonal_and_forget_gates_open(name: str, gates: int) -> None:
    model = made(name)
    assert isinstance(model, RecurrentModel)
    for cell in model.cells:
        assert isinstance(cell, nn.RNNBase)
        matrices = cell.weight_hh_l0.view(gates, 16, 16)
        for matrix in matrices:
            torch.testing.assert_close(matrix @ matrix.T, torch.eye(16), rtol=0, atol=1e-5)
        bias = (cell.bias_ih_l0 + cell.bias_hh_l0).view(gates, 16)
        expected = torch.zeros(gates, 16)
        if name == "lstm":
            expected[1] = 1  # torch orders an LSTM's gates: input, forget, cell, output
        assert torch.equal(bias, expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_tied_to_the_embedding(name: str) -> None:
    model = made(name)
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes.count((VOCABULARY, 16)) == 1
    model(tokens())[0].sum().backward()
    assert model.embedding.tokens.weight.grad is not None


def test_ngrams_of_equal_tokens_are_equal_wherever_they_stand() -> None:
    torch.manual_seed(0)
    embedding = NgramEmbedding(VOCABULARY, 8, [2, 4], 1000, 4)
    text = torch.tensor([[9, 9, 1, 2, 3, 4, 7, 1, 2, 3, 4, 8, 2, 3, 4]])
    embedded, past = embedding(text, None)
    assert torch.allclose(embedded[0, 5], embedded[0, 10])  # 1 2 3 4 before both
    assert not torch.allclose(embedded[0, 5], embedded[0, 14])  # 8 2 3 4 here
    assert past.tolist() == [[2, 3, 4]]
    again, _ = embedding(torch.tensor([[4]]), torch.tensor([[1, 2, 3]]))
    assert torch.allclose(again[0, 0], embedded[0, 5])


def test_ngrams_of_a_text_seldom_share_a_row() -> None:
    """As seldom as by a perfect hash: of k keys in n rows, n (1 - (1 - 1/n)^k) rows are used."""
    rows, keys = 4096, 5000
    embedding = NgramEmbedding(256, 8, [3], rows, 4)
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(32, 127, (1, keys + 2), generator=draw)
    embedding(text, None)[0].sum().backward()
    weight = embedding.ngrams.weight.grad
    assert weight is not None
    used = int((weight != 0).any(dim=1).sum())
    assert used == pytest.approx(rows * (1 - (1 - 1 / rows) ** keys), rel=0.03)


# -- the task ---------------------------------------------------------------------------------------


def opened(tmp_path: Path, name: str = "lstm", **data: Any) -> tuple[LanguageModelling, nn.Module]:
    task, text = language_model(write_text(tmp_path / "text.txt"), name, data=data)
    text.prepare(World(), 0)
    torch.manual_seed(0)
    return task, task.build()


def test_a_uniform_guess_costs_eight_bits_a_byte(tmp_path: Path) -> None:
    task, model = opened(tmp_path)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    scored = torch.ones(2, 10, dtype=torch.bool)
    scored[1, 4:] = False
    with torch.inference_mode():
        sums = task.evaluate(model, Windows(torch.randint(256, (2, 11)), None, scored))
    assert int(sums["tokens"]) == int(sums["bytes"]) == 14
    metrics = task.report(sums).metrics
    assert metrics["bits_per_byte"] == pytest.approx(8.0)
    assert metrics["loss"] == pytest.approx(math.log(256))
    assert metrics["perplexity"] == pytest.approx(256)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_piece_longer_than_a_window_is_scored_with_all_of_its_past(tmp_path: Path, name: str) -> None:
    """Three windows and a bit, against one forward pass over all of them."""
    task, model = opened(tmp_path, name)
    text = torch.randint(256, (2, 27))
    with torch.inference_mode():
        logits, _ = model.eval()(text[:, :-1], None)
        whole = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
        sums = task.evaluate(model, Windows(text, None, torch.ones(2, 26, dtype=torch.bool)))
    torch.testing.assert_close(sums["nats"], whole, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_dropout_is_for_training_only(tmp_path: Path, name: str) -> None:
    model, text = made(name, dropout=0.5), tokens()
    assert torch.equal(model(text)[0], model(text)[0])
    model.train()
    assert not torch.equal(model(text)[0], model(text)[0])


def test_bits_per_byte_count_the_bytes_of_characters(tmp_path: Path) -> None:
    task, model = opened(tmp_path, level="characters")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    vocabulary = task._data.vocabulary
    text = vocabulary.encode("a →ß", "test")
    windows = Windows(torch.tensor([text]), None, torch.ones(1, 3, dtype=torch.bool))
    with torch.inference_mode():
        sums = task.evaluate(model, windows)
    assert int(sums["bytes"]) == len(" →ß".encode()) == 6
    expected = 3 * math.log2(len(vocabulary)) / 6
    assert task.report(sums).metrics["bits_per_byte"] == pytest.approx(expected)


def test_the_state_is_carried_detached_and_given_back(tmp_path: Path) -> None:
    task, model = opened(tmp_path)
    progress = Progress(0, 0, 0.0)
    first = Windows(torch.randint(256, (2, 9)), slice(0, 2))
    second = Windows(torch.randint(256, (2, 9)), slice(0, 2))
    task.loss(model, first, progress)
    rank_state = {name: value.clone() for name, value in task.rank_state().items()}
    assert rank_state["hidden"].shape == (2, 2, 2, 16)
    assert not rank_state["hidden"].requires_grad
    after = task.loss(model, second, progress).sum
    task.load_rank_state(rank_state)
    assert torch.equal(task.loss(model, second, progress).sum, after)
    task.load_rank_state({})
    assert task.loss(model, second, progress).sum != after


def test_a_prompts_continuation_is_repeatable_and_obeys_its_parameters(tmp_path: Path) -> None:
    task, model = opened(tmp_path)
    with torch.inference_mode():
        once, again, other = (
            "".join(task.predict(model.eval(), prompt="the", tokens=40, seed=seed)) for seed in (1, 1, 2)
        )
        coldest, narrow = (
            "".join(task.predict(model, prompt="the", tokens=40, seed=seed, **words))
            for seed, words in ((1, {"temperature": 0.0}), (2, {"top_k": 1}))
        )
    assert once == again != other
    assert once.startswith("the")
    assert coldest == narrow


@pytest.mark.long
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.4, None), (1.0, 3), (2.0, 3)])
def test_a_continuation_is_drawn_from_the_models_own_probabilities(
    temperature: float, top_k: int | None
) -> None:
    """The next token, drawn 3,000 times, against the softmax."""
    model, begun = made("lstm"), tokens(1, 10)
    nn.init.normal_(model.bias, std=1.0)  # far from uniform
    with torch.inference_mode():
        logits = model(begun)[0][0, -1]
        if top_k is not None:
            logits[logits.argsort(descending=True)[top_k:]] = -math.inf
        expected = (logits / temperature).softmax(dim=0)
        seeds = (torch.Generator().manual_seed(seed) for seed in range(3000))
        draws = [next(continuation(model, begun, temperature, top_k, seed)) for seed in seeds]
    found = torch.bincount(torch.tensor(draws), minlength=VOCABULARY) / len(draws)
    assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / len(draws))
    assert 0.05 < expected.max() < 0.9


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0])
def test_a_model_that_has_diverged_still_writes(temperature: float) -> None:
    """Its sample is rubbish, but it is the loss that ends the run, with a message."""
    model, begun = made("lstm"), tokens(1, 10)
    nn.init.constant_(model.bias, math.nan)
    with torch.inference_mode():
        drawn = continuation(model, begun, temperature, None, torch.Generator().manual_seed(0))
        assert all(0 <= token < VOCABULARY for token in islice(drawn, 5))


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_continuation_reads_each_token_once(name: str) -> None:
    """Also where the text is longer than a Transformer's window: the model is given one token at a time."""
    model, lengths = made(name, window=8), []
    model.register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].shape[1]))
    with torch.inference_mode():
        drawn = continuation(model, tokens(1, 10), 1.0, None, torch.Generator().manual_seed(0))
        list(islice(drawn, 30))
    assert lengths == [10] + [1] * 29
