"""What is likely wrong with the labels of a set, before a training: as text, and as a page of pictures."""

import html
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ddptrain.data.detection.source import DetectionSet, Scenes
from ddptrain.data.pictures import claim
from ddptrain.errors import UserError
from ddptrain.text import counted

log = logging.getLogger("ddptrain")

_SAME_OBJECT = 0.9
"""IoU from which two boxes are taken for one object's."""
_LEAST_SIDE = 4.0
"""Pixels, at the size that is trained on: half a cell of the finest stride."""
_SHOWN = 60
"""Most pictures of a kind on the page."""
_SIDE = 360
"""Pixels of a picture's longer side there."""
_THUMB = 32
_CLOSE, _FLAT = 3.0, 4.0
"""Of a thumbnail's values in 0..255: the mean difference up to which two pictures are the same, and the
standard deviation below which a picture shows too little to tell."""
_BANDS = 4
"""Parts of a picture's hash of 64 bits; pictures that differ in fewer bits agree in one of these."""
_MOST_ALIKE = 200
"""Pictures with one band in common that are compared with each other."""
_KINDS = {
    "left out": "What can't be trained on",
    "doubled": "Two boxes on one object",
    "tiny": "Boxes that are too small to be found",
    "classes": "Classes with few objects",
    "in both parts": "Pictures that are in both parts",
    "twice": "Pictures that are there twice",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h2 { margin-top: 2.5rem; } figure { display: inline-block; margin: 0 1rem 1rem 0; vertical-align: top; }
figure img { max-width: 100%; border: 1px solid #ccc; } figcaption { max-width: 22rem; font-size: 13px;
overflow-wrap: anywhere; } li { overflow-wrap: anywhere; } .none { color: #666; }
"""


class _Seen(NamedTuple):
    """A picture, and which of its boxes are meant."""

    scenes: Scenes
    picture: int
    boxes: Sequence[int] = ()


class Mistake(NamedTuple):
    """Something that is likely wrong."""

    kind: str
    line: str
    seen: Sequence[_Seen] = ()
    """What shows it."""


def write_check(opened: DetectionSet, folder: Path, size: int) -> Iterator[str]:
    """Look for mistakes, and write ``mistakes.txt`` and ``index.html`` with ``pictures/`` into a new folder.

    size: pixels of the longer side in training. Yields lines that say how many there are of each kind.
    Raises UserError where the folder holds something already.
    """
    claim(folder)
    mistakes = defaultdict(list)
    for mistake in find_mistakes(opened, size):
        mistakes[mistake.kind].append(mistake)
    lines = [f"{kind}: {mistake.line}" for kind in _KINDS for mistake in mistakes[kind]]
    text = "".join(f"{line}\n" for line in lines)
    (folder / "mistakes.txt").write_text(text, "utf-8", "backslashreplace")  # names need not be UTF-8
    (folder / "pictures").mkdir()
    sections = [_section(title, mistakes[kind], folder, kind) for kind, title in _KINDS.items()]
    (folder / "index.html").write_text(_page(opened, "".join(sections)), "utf-8", "backslashreplace")
    for kind, title in _KINDS.items():
        yield f"{len(mistakes[kind]):6,}  {title.lower()}"
    yield f"{folder / 'mistakes.txt'} lists them, {folder / 'index.html'} shows them"


def find_mistakes(opened: DetectionSet, size: int) -> Iterator[Mistake]:
    """Each once."""
    for line in opened.skipped:
        yield Mistake("left out", line)
    for part, scenes in _parts(opened).items():
        for i in range(len(scenes)):
            yield from _of_a_picture(part, scenes, i, opened.classes, size)
    yield from _of_classes(opened)
    yield from _of_copies(opened)


def _parts(opened: DetectionSet) -> dict[str, Scenes]:
    return {"train": opened.train, "val": opened.valid}


def _of_a_picture(part: str, scenes: Scenes, i: int, classes: Sequence[str], size: int) -> Iterator[Mistake]:
    from torchvision.ops import box_iou

    on_it, name = scenes.objects[i], f"{part}: {scenes.names[i]}"
    own = (~on_it.crowd).nonzero()[:, 0].tolist()
    boxes, labels = on_it.boxes[own], on_it.labels[own].tolist()
    overlaps = box_iou(boxes, boxes).triu(1)
    corners = [" ".join(f"{at:.4g}" for at in box) for box in boxes.tolist()]
    for a, b in (overlaps >= _SAME_OBJECT).nonzero().tolist():
        kinds = " and ".join(dict.fromkeys(classes[labels[box]] for box in (a, b)))
        line = f"{name}: boxes {corners[a]} and {corners[b]} ({kinds}) are one: IoU {overlaps[a, b]:.2f}"
        yield Mistake("doubled", line, [_Seen(scenes, i, (own[a], own[b]))])
    sides = (boxes[:, 2:] - boxes[:, :2]) * (size / int(scenes.sizes[i].max()))
    for a in (sides.amin(1) < _LEAST_SIDE).nonzero()[:, 0].tolist():
        wide, high = sides[a].tolist()
        shown = f"{wide:.1f} x {high:.1f} pixels at data.size={size}"
        line = f"{name}: box {corners[a]} ({classes[labels[a]]}) is {shown}"
        yield Mistake("tiny", line, [_Seen(scenes, i, (own[a],))])


def _of_classes(opened: DetectionSet) -> Iterator[Mistake]:
    """Those of which there is at most one object in a part."""
    parts = _parts(opened)
    objects = {part: Counter[int]() for part in parts}
    where: dict[tuple[str, int], _Seen] = {}
    for part, scenes in parts.items():
        for i, on_it in enumerate(scenes.objects):
            for box, label in enumerate(on_it.labels.tolist()):
                if not on_it.crowd[box]:
                    objects[part][label] += 1
                    where.setdefault((part, label), _Seen(scenes, i, (box,)))
    for label, name in enumerate(opened.classes):
        for part in parts:
            count = objects[part][label]
            if count < 2:
                seen = [where[part, label]] if count else []
                yield Mistake("classes", f"{part}: {name}: {counted(count, 'object')}", seen)


def _of_copies(opened: DetectionSet) -> Iterator[Mistake]:
    """Pictures that are the same to the eye, whatever their files' names, sizes and compression are."""
    whole = [(part, scenes, i) for part, scenes in _parts(opened).items() for i in range(len(scenes))]
    kept, thumbs, exact = [], [], []
    for part, scenes, i in whole:
        try:
            pixels = scenes.image(i)
        except UserError as error:  # its body is broken, which opening the set has not seen
            yield Mistake("left out", str(error))
            continue
        kept.append((part, scenes, i))
        thumbs.append(thumb := _thumbnail(pixels))
        exact.append(sha256((pixels if _is_flat(thumb) else thumb).numpy().tobytes()).digest())
    for a, b in _alike(thumbs, exact):
        (part, scenes, i), (other_part, others, j) = kept[a], kept[b]
        line = f"{part}: {scenes.names[i]} = {other_part}: {others.names[j]}"
        kind = "twice" if part == other_part else "in both parts"
        yield Mistake(kind, line, [_Seen(scenes, i), _Seen(others, j)])


def _thumbnail(pixels: Tensor) -> Tensor:
    """uint8 (3, H, W) -> uint8 (_THUMB, _THUMB), grey."""
    grey = pixels.float().mean(0)[None, None]
    thumb = functional.interpolate(grey, (_THUMB, _THUMB), mode="bilinear", antialias=True)[0, 0]
    return thumb.round().to(torch.uint8)


def _is_flat(thumb: Tensor) -> bool:
    """Whether it shows too little to tell pictures apart."""
    return bool(thumb.float().std() < _FLAT)


def _alike(thumbs: Sequence[Tensor], exact: Sequence[bytes]) -> list[tuple[int, int]]:
    """Pairs of thumbnails that are the same, by a hash of differences and then by their values. exact: what
    only copies have in common."""
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, thumb in enumerate(thumbs):
        if _is_flat(thumb):
            continue
        small = functional.interpolate(thumb.float()[None, None], (8, 9), mode="area")[0, 0]
        bits = (small[:, 1:] > small[:, :-1]).flatten().tolist()
        for band in range(_BANDS):
            part = bits[band::_BANDS]
            buckets[band, sum(bit << k for k, bit in enumerate(part))].append(i)
    candidates = {pair for alike in buckets.values() for pair in combinations(alike[:_MOST_ALIKE], 2)}
    if (most := max(map(len, buckets.values()), default=0)) > _MOST_ALIKE:
        log.warning(
            "note       %d pictures look so much alike that, but for exact copies, only the first %d of them"
            " were compared with each other", most, _MOST_ALIKE,
        )  # fmt: skip
    first_of: dict[bytes, int] = {}
    for i, digest in enumerate(exact):
        first = first_of.setdefault(digest, i)
        candidates |= {(first, i)} if first != i else set()
    return [pair for pair in sorted(candidates) if _difference(*(thumbs[i] for i in pair)) <= _CLOSE]


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().mean())


def _section(title: str, mistakes: Sequence[Mistake], folder: Path, kind: str) -> str:
    head = f"<h2>{html.escape(title)}: {len(mistakes):,}</h2>\n"
    if not mistakes:
        return head + '<p class="none">none</p>\n'
    if not any(mistake.seen for mistake in mistakes):
        listed = "".join(f"<li>{html.escape(mistake.line)}</li>\n" for mistake in mistakes[:_SHOWN])
        return f"{head}<ul>\n{listed}</ul>\n{_rest(mistakes)}"
    shown = []
    for number, mistake in enumerate(mistakes[:_SHOWN]):
        images = ""
        for k, seen in enumerate(mistake.seen):
            file = f"pictures/{kind.replace(' ', '-')}-{number}-{k}.png"
            with suppress(UserError):  # a broken one is listed itself
                _draw(seen, folder / file)
                images += f'<img src="{file}" alt="" loading="lazy">'
        shown.append(f"<figure>{images}<figcaption>{html.escape(mistake.line)}</figcaption></figure>\n")
    return head + "".join(shown) + _rest(mistakes)


def _rest(mistakes: Sequence[Mistake]) -> str:
    more = len(mistakes) - _SHOWN
    return f"<p>and {more:,} more, in mistakes.txt</p>\n" if more > 0 else ""


def _draw(seen: _Seen, file: Path) -> None:
    """The picture with all of its boxes, those that are meant in red."""
    from torchvision.transforms.v2.functional import resize, to_pil_image
    from torchvision.utils import draw_bounding_boxes

    scenes, i, meant = seen
    height, width = scenes.sizes[i].tolist()
    times = _SIDE / max(height, width)
    pixels = resize(scenes.image(i), [max(1, round(height * times)), max(1, round(width * times))])
    for number, box in enumerate(scenes.objects[i].boxes * times):
        # white around the red, which is seen on a red picture, too
        lines = [("white", 6), ("#e03131", 3)] if number in meant else [("#868e96", 1)]
        for colour, thick in lines:
            pixels = draw_bounding_boxes(pixels, box[None], colors=colour, width=thick)
    to_pil_image(pixels).save(file)


def _page(opened: DetectionSet, sections: str) -> str:
    counts = f"{len(opened.train):,} training and {len(opened.valid):,} validation pictures"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Labels</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>What is likely wrong with these labels</h1>\n"
        f"<p>{counts}, {len(opened.classes):,} classes.</p>\n{sections}</body></html>\n"
    )
