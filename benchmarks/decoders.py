"""JPEGs per second that one core decodes, and decodes and scales: Pillow, torchvision, and other libraries.

    pip install opencv-python-headless simplejpeg imagecodecs pyvips-binary pyvips   # or some
    python benchmarks/decoders.py                      # a Markdown table on stdout, in some 2 minutes
    python benchmarks/decoders.py --write docs/performance.md    # and into that file

All decode the same files from memory into uint8 RGB. Chunks of all take turns in one process on one core, in
both directions, and a ratio is taken within one round. The pixels are compared with Pillow's.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import compute_alone_on, made_with, publish, rounds_parser
from PIL import Image
from pipelines import write_jpegs
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional

NAME = "decoders"
"""Of the markers."""
SIDE = 224
FILES = 64
"""Of a chunk."""

Decode = Callable[[bytes], Any]
"""A file's pixels, as the library gives them."""


class Decoder(NamedTuple):
    """decode: uint8 (h, w, 3), or a tensor (3, h, w). scale: to `SIDE` x `SIDE`."""

    title: str
    decode: Decode
    scale: Callable[[Any], Any]


class Chunk(NamedTuple):
    """Files per second."""

    decoded: float
    scaled: float


def main() -> None:
    arguments = rounds_parser(__doc__, NAME, 20).parse_args()
    compute_alone_on(1)
    with tempfile.TemporaryDirectory() as folder:
        size = write_jpegs(Path(folder))
        files = [file.read_bytes() for file in sorted(Path(folder).rglob("*.jpg"))[:FILES]]
    decoders = known()
    chunks: dict[str, list[Chunk]] = {decoder.title: [] for decoder in decoders}
    for number in range(arguments.rounds + 1):  # the first is not counted: in it libraries are set up
        for decoder in reversed(decoders) if number % 2 else decoders:
            chunks[decoder.title].append(_chunk(decoder, files))
    lines = [
        f"| JPEGs of 500 x 375 ({size / 1000:.0f} kB), one core | decoded/s | beside the first (least, most)"
        f" | and scaled to {SIDE} x {SIDE}/s | beside the first (least, most) | pixels differ by at most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    counted = {title: own[1:] for title, own in chunks.items()}
    base = counted[decoders[0].title]
    for decoder in decoders:
        own = counted[decoder.title]
        columns = (_columns(own, base, name) for name in Chunk._fields)
        apart = max(_apart(decoder, file) for file in files)
        lines.append(f"| {decoder.title} | {' | '.join(columns)} | {apart} |")
    publish("\n".join([*lines, "", _note(arguments.rounds)]), NAME, arguments.write)


def known() -> list[Decoder]:
    """Those that are installed; the first is what the others are held beside."""

    def by_pillow(content: bytes) -> Image.Image:
        with Image.open(BytesIO(content)) as picture:
            return picture.convert("RGB")

    decoders = [
        Decoder("Pillow", by_pillow, lambda p: p.resize((SIDE, SIDE), Image.Resampling.BILINEAR)),
        Decoder(
            "torchvision (**ddptrain**'s)", _by_torchvision, lambda p: functional.resize(p, [SIDE, SIDE])
        ),
    ]
    if find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)
        decoders.append(
            Decoder(
                "OpenCV",
                lambda content: cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB),
                lambda pixels: cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA),
            )
        )
    if find_spec("simplejpeg"):
        import simplejpeg

        decoders.append(
            Decoder(
                "simplejpeg, scaled by Pillow",
                lambda content: simplejpeg.decode_jpeg(content, fastdct=False, fastupsample=False),
                _scaled_by_pillow,
            )
        )
    if find_spec("imagecodecs"):
        import imagecodecs

        decoders.append(Decoder("imagecodecs, scaled by Pillow", imagecodecs.jpeg8_decode, _scaled_by_pillow))
    if find_spec("pyvips"):
        import pyvips

        def scaled_by_vips(pixels: Any) -> Any:
            height, width, _ = pixels.shape
            picture = pyvips.Image.new_from_array(pixels)
            return picture.resize(SIDE / width, vscale=SIDE / height).numpy()

        decoders.append(
            Decoder(
                "libvips",
                lambda content: pyvips.Image.new_from_buffer(content, "").numpy(),
                scaled_by_vips,
            )
        )
    return decoders


def _by_torchvision(content: bytes) -> torch.Tensor:
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    pixels: torch.Tensor = decode_jpeg(data, ImageReadMode.RGB)
    return pixels


def _scaled_by_pillow(pixels: Any) -> Image.Image:
    return Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def _chunk(decoder: Decoder, files: Sequence[bytes]) -> Chunk:
    began = time.perf_counter()
    for file in files:
        decoder.decode(file)
    decoded = time.perf_counter()
    for file in files:
        decoder.scale(decoder.decode(file))
    return Chunk(len(files) / (decoded - began), len(files) / (time.perf_counter() - decoded))


def _apart(decoder: Decoder, file: bytes) -> int:
    """Levels, of 255."""
    pixels = decoder.decode(file)
    if isinstance(pixels, torch.Tensor):
        pixels = pixels.permute(1, 2, 0).numpy()
    with Image.open(BytesIO(file)) as picture:
        return int(np.abs(np.asarray(pixels, np.int16) - np.asarray(picture.convert("RGB"), np.int16)).max())


def _columns(own: Sequence[Chunk], base: Sequence[Chunk], name: str) -> str:
    rates = [getattr(chunk, name) for chunk in own]
    if own is base:
        return f"{statistics.median(rates):,.0f} | 1"
    ratios = [rate / getattr(other, name) for rate, other in zip(rates, base, strict=True)]
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{statistics.median(rates):,.0f} | **{statistics.median(ratios):.2f}** {spread}"


def _note(rounds: int) -> str:
    optional = {"cv2": "opencv-python-headless", "pyvips": "pyvips-binary"}
    optional |= {name: name for name in ("simplejpeg", "imagecodecs")}
    packages = ["torchvision", "pillow", *(optional[module] for module in optional if find_spec(module))]
    return (
        f"{FILES} files a chunk, {rounds} rounds in which all take turns. {made_with(*packages)}"
        " Made by `python benchmarks/decoders.py`."
    )


if __name__ == "__main__":
    main()
