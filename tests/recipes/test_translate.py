"""The date translator: its pairs, its masks, its search."""

import datetime
import re
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.api.recipe import Progress
from ddptrain.api.world import World
from ddptrain.data.text.dates import BEGIN, END, VOCABULARY, DatePairs, Pairs, decoded, encoded, padded
from ddptrain.errors import UserError
from ddptrain.recipes.encoder_decoder import EncoderDecoder
from ddptrain.recipes.translate import Translation, beam_search, greedy


def small_model(layers: int = 1) -> EncoderDecoder:
    torch.manual_seed(0)
    model = EncoderDecoder(VOCABULARY, DatePairs.longest, DatePairs.target_length, 16, layers, heads=2)
    with torch.no_grad():
        model.tokens.weight.mul_(8)  # probabilities far enough apart that ties are no concern
    return model.eval()


def opened(seed: int = 0) -> DatePairs:
    data = DatePairs(train=600, valid=200, seed=seed)
    data.prepare(World(), 0)
    return data


def all_pairs(data: DatePairs) -> tuple[Pairs, Pairs]:
    [valid] = data.valid_batches([range(data.valid_size)])
    return data._ready.train, valid


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126)))
def test_text_survives_its_tokens(text: str) -> None:
    assert decoded([BEGIN, *encoded(text, "test"), END, 7, 8]) == text


def test_each_source_says_the_day_that_its_target_names() -> None:
    """By another reader: the digits and the month's name are looked for in the source."""
    months = [datetime.date(2000, m, 1).strftime("%b").lower() for m in range(1, 13)]
    for pairs in all_pairs(opened()):
        for source, target in zip(pairs.source.tolist(), pairs.target.tolist(), strict=True):
            day = datetime.date.fromisoformat(decoded(target))
            text = decoded(source).lower()
            numbers = [int(number) for number in re.findall(r"\d+", text)]
            assert day.year in numbers
            assert day.day in numbers
            assert months[day.month - 1] in text or numbers == [day.day, day.month, day.year]


def test_pairs_follow_from_the_seed_and_no_day_is_in_both_parts() -> None:
    train, valid = all_pairs(opened())
    assert all(torch.equal(a, b) for a, b in zip(train, all_pairs(opened())[0], strict=True))
    assert not torch.equal(train.target, all_pairs(opened(seed=1))[0].target)
    days = [{decoded(row) for row in pairs.target.tolist()} for pairs in (train, valid)]
    assert not days[0] & days[1]
    assert len({decoded(row) for row in train.source.tolist()}) > 500


def test_padding_is_never_looked_at() -> None:
    model = small_model(layers=2)
    source = torch.tensor([padded("3 March 1998", "test")])
    target = torch.tensor([[BEGIN, *encoded("1998-", "test")]])
    with torch.inference_mode():
        long, short = model(source, target), model(source[:, :12], target)
    torch.testing.assert_close(long, short, rtol=1e-4, atol=1e-5)


def test_where_a_character_stands_matters_in_source_and_target() -> None:
    model = small_model(layers=2)
    sources = [torch.tensor([padded(text, "test")]) for text in ("12.3.1998", "21.3.1998")]
    targets = [torch.tensor([[BEGIN, *encoded(text, "test")]]) for text in ("199", "919")]
    with torch.inference_mode():
        assert not torch.allclose(model(sources[0], targets[0]), model(sources[1], targets[0]))
        first, second = (model(sources[0], target)[0, -1] for target in targets)
    assert not torch.allclose(first, second)


def test_smoothed_labels_cost_what_the_formula_says() -> None:
    """(1 - s) of the target's nats and s of the mean over the vocabulary (arXiv 1512.00567)."""
    data, model = opened(), small_model()
    [batch] = data.valid_batches([range(4)])
    plain, smoothed = (
        Translation(lambda **_: model, data, label_smoothing=s).loss(model, batch, Progress(0, 0, 0.0)).sum
        for s in (0.0, 0.1)
    )
    uniform = -model(batch.source, batch.target[:, :-1]).log_softmax(dim=-1).mean(dim=-1).sum()
    torch.testing.assert_close(smoothed, 0.9 * plain + 0.1 * uniform)


def test_no_target_token_sees_what_follows_it() -> None:
    model = small_model(layers=2)
    source = torch.tensor([padded("3 March 1998", "test")])
    one = torch.tensor([[BEGIN, *encoded("1998-03", "test")]])
    other = torch.tensor([[BEGIN, *encoded("1998x03", "test")]])
    with torch.inference_mode():
        a, b = model(source, one), model(source, other)
    assert torch.equal(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5], b[:, 5])


def test_greedy_takes_the_best_token_each_time_and_a_beam_of_one_is_greedy() -> None:
    model = small_model()
    source = torch.tensor([padded(text, "test") for text in ("3 March 1998", "May 5, 2001")])
    with torch.inference_mode():
        found = greedy(model, source, 4)
        logits = model(source, torch.cat([torch.full((2, 1), BEGIN), found[:, :-1]], dim=1))
        assert torch.equal(logits.argmax(dim=-1), found)
        for row, own in zip(source, found, strict=True):
            alone = beam_search(model, row[None], 4, beam=1)
            ended = own.tolist().index(END) + 1 if END in own else len(own)
            assert alone[:ended].tolist() == own[:ended].tolist()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_a_wide_beam_finds_the_most_probable_text_of_all(seed: int) -> None:
    """Against trying them all: two tokens of a vocabulary of eight."""
    torch.manual_seed(seed)
    model = EncoderDecoder(8, 4, 3, 16, 1, heads=2).eval()
    with torch.no_grad():
        model.tokens.weight.mul_(10)
    source = torch.tensor([[3, 4, 5, 0]])
    with torch.inference_mode():
        found = beam_search(model, source, 2, beam=64).tolist()
        every = torch.tensor([[BEGIN, *pair] for pair in product(range(8), repeat=2)])
        steps = model(source.expand(64, -1), every[:, :-1]).log_softmax(dim=-1)
        scores = steps.gather(2, every[:, 1:, None]).squeeze(2)
        scores[:, 1] = torch.where(every[:, 1] == END, 0.0, scores[:, 1])
        best = every[scores.sum(dim=1).argmax(), 1:].tolist()
    assert found[0] == best[0]
    assert found[0] == END or found == best


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"text": "3. März 1998"}, "'ä'"),
        ({"text": ""}, "0 characters"),
        ({"text": "x" * 33}, "33 characters"),
        ({"text": "1", "beam": 0}, "beam=0"),
    ],
)
def test_what_a_user_asks_is_checked(words: dict[str, Any], said: str) -> None:
    task = Translation(lambda **_: small_model(), opened())
    with pytest.raises(UserError, match=said):
        list(task.predict(small_model(), **words))
