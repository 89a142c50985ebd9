"""Videos of squares that move, with their true tracks."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

WIDTH, HEIGHT, SIDE, RATE = 320, 240, 28, 25


def paths(objects: int, frames: int) -> Tensor:
    """float32 (frames, objects, 4): squares that cross each other's ways and turn at the edges."""
    draw = np.random.default_rng(5)
    place = draw.uniform(SIDE, [WIDTH - SIDE, HEIGHT - SIDE], (objects, 2))
    speed = draw.uniform(1.5, 4, (objects, 2)) * draw.choice([-1, 1], (objects, 2))
    boxes = []
    for _ in range(frames):
        boxes.append(np.concatenate([place - SIDE / 2, place + SIDE / 2], axis=1))
        place = place + speed
        outside = (place < SIDE) | (place > np.array([WIDTH, HEIGHT]) - SIDE)
        speed = np.where(outside, -speed, speed)
    return torch.from_numpy(np.stack(boxes)).float()


def write_clip(
    file: Path,
    boxes: Tensor,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    codec: str = "libx264",
    gap: tuple[int, float] = (0, 0.0),
) -> None:
    """gap: before this frame, of so many seconds."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i, of_frame in enumerate(boxes.round().long().tolist()):
            pixels = np.full((size[1], size[0], 3), 90, np.uint8)
            for number, (left, top, right, bottom) in enumerate(of_frame):
                pixels[top:bottom, left:right] = (40 * number % 255, 220, 255 - 30 * number)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i + round(gap[1] * RATE) * (i >= gap[0]), Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
