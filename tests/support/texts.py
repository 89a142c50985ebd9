"""Small texts and language models for tests."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddptrain.data.text.corpus import TextFiles
from ddptrain.data.text.data import TextData
from ddptrain.recipes.recurrent import RecurrentModel
from ddptrain.recipes.text import LanguageModelling
from ddptrain.recipes.transformer import TransformerModel

SMALL: dict[str, Any] = {"width": 16, "layers": 2, "ngrams": [2, 3], "ngram_rows": 64, "ngram_width": 8}


def write_text(path: Path, words: int = 1500) -> Path:
    """Words drawn by a fixed seed, ten a line."""
    draw = random.Random(3)
    known = ["the", "cat", "sat", "on", "a", "mat", "and", "däs", "saß", "→"]
    lines = [" ".join(draw.choice(known) for _ in range(10)) for _ in range(words // 10)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def language_model(
    text: Path,
    model: str = "lstm",
    data: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> tuple[LanguageModelling, TextData]:
    """A recipe on a text: model is a cell's name or ``transformer``."""
    is_transformer = model == "transformer"
    order = {"order": "shuffled" if is_transformer else "streams"}
    settings = {"window": 8, "valid_piece": 16, "valid_context": 8, **order, **(data or {})}
    source = TextData(TextFiles(str(text)), root=str(text.parent), **settings)
    build = (
        partial(TransformerModel, heads=2, **{**SMALL, **changes})
        if is_transformer
        else partial(RecurrentModel, cell=model, **{**SMALL, **changes})  # type: ignore[arg-type]
    )

    def make(vocabulary: int, window: int) -> Any:
        made = build(vocabulary, window=window) if is_transformer else build(vocabulary)
        return made.to(dtype)

    return LanguageModelling(make, source, sample_tokens=20), source
