"""Pictures from a stream beside the same pictures as files and litdata's own loader; and how long a training
waits for a store far away.

    python benchmarks/stream.py --write docs/streaming.md    # some 10 minutes; needs litdata

Warm: samples per second of a rank's two workers, decoded, cut and normalised, everything in the cache. Cold:
nothing is; the server answers after 20 ms and sends 50 MB/s, and a step takes 200 ms.
"""

import http.server
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import made_with, publish, rounds_parser
from PIL import Image

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.images.augment import Augment
from ddptrain.data.images.data import ImageData
from ddptrain.data.images.folder import ImageFolder
from ddptrain.data.pictures import Encoded, fitted
from ddptrain.data.stream.images import StreamImages

NAME = "stream"
"""Of the markers."""
COUNT, PIXELS, SIDE, BATCH = 3000, 256, 224, 64
WORKERS, STEPS = 2, 30
LATENCY_S, BYTES_A_S, STEP_S = 0.02, 50e6, 0.2


def main() -> None:
    arguments = rounds_parser(__doc__, NAME, 7).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        pictures, blocks = home / "pictures", home / "blocks"
        draw(pictures)
        files = ImageData(ImageFolder(SIDE), Augment(), str(pictures), WORKERS, resident=False)
        list(files.write(blocks, "stream", 8.0))
        ways: dict[str, Callable[[], Iterator[Any]]] = {
            "files": lambda: ours(files), "stream": lambda: ours(streamed(str(blocks), home / "cache")),
            "litdata": partial(litdatas, blocks / "train", home / "litdata"),
        }  # fmt: skip
        speeds: dict[str, list[float]] = defaultdict(list)
        for number in range(arguments.rounds + 1):
            for name in (*list(ways)[number % 3 :], *list(ways)[: number % 3]):
                speed = timed(ways[name]())
                if number:  # the first round fills the caches
                    speeds[name].append(speed)
        near = [paced(ours(files)) for _ in range(3)]
        far = [cold(blocks, home / f"cold-{i}") for i in range(3)]
    lines = ["| | samples/s, median | stream beside it: median | least, most |", "|---|---:|---:|---:|"]
    for name, measured in speeds.items():
        ratios = [own / other for own, other in zip(speeds["stream"], measured, strict=True)]
        spread = f"{min(ratios):.2f}, {max(ratios):.2f}" if name != "stream" else ""
        middle = f"**{statistics.median(ratios):.2f}**" if name != "stream" else "1"
        lines.append(f"| {name} | {statistics.median(measured):.0f} | {middle} | {spread} |")
    size = f"{COUNT} JPEGs of {PIXELS}x{PIXELS} pixels, cut to {SIDE}x{SIDE}"
    note = (
        f"{size}; {WORKERS} workers, batches of {BATCH}; {arguments.rounds} rounds in which all take turns."
        f" From an empty cache, {LATENCY_S * 1e3:.0f} ms and {BYTES_A_S / 1e6:.0f} MB/s away, with steps of"
        f" {STEP_S * 1e3:.0f} ms: the time for a batch is {', '.join(f'{wait:.1%}' for wait in far)} of all"
        f" after the first one; of files {', '.join(f'{wait:.1%}' for wait in near)}."
        f" {made_with('torch', 'litdata')}"
    )
    publish("\n".join([*lines, "", note]), NAME, arguments.write)


def draw(root: Path) -> None:
    """Pictures that compress as photographs do: smooth, with some noise."""
    for i in range(COUNT):
        part = root / ("val" if i % 10 == 0 else "train") / f"class{i % 4}"
        part.mkdir(parents=True, exist_ok=True)
        dice = np.random.default_rng(i)
        coarse = Image.fromarray(dice.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = (smooth + dice.integers(-8, 9, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(part / f"{i:05}.jpg", quality=85)


def streamed(url: str, cache: Path) -> ImageData:
    source = StreamImages(url, size=SIDE, cache=str(cache), cache_gb=1, shuffle_blocks=4)
    return ImageData(source, Augment(), workers=WORKERS, resident=False)


def ours(data: ImageData) -> Iterator[Any]:
    data.prepare(World(), seed=0)
    return data.train_batches(Sampler(data.train_size, BATCH, 0, epoch_order=data.epoch_order), range(1000))


def _as_batch(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    pictures = [fitted(Encoded(sample["image"], "a sample"), (SIDE, SIDE, 3)) for sample in samples]
    return torch.stack(pictures), torch.tensor([sample["label"] for sample in samples])


def litdatas(folder: Path, cache: Path) -> Iterator[Any]:
    """litdata's loader on the same chunks, with the same work on each picture."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder), cache_dir=str(cache), shuffle=True)
    loader = StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=_as_batch, drop_last=True
    )
    while True:
        for pixels, labels in loader:
            yield (pixels.permute(0, 3, 1, 2).float() - 120) / 58, labels


def timed(batches: Iterator[Any]) -> float:
    """Samples per second, after the workers have started."""
    for _ in islice(batches, 2 * WORKERS + 1):
        pass
    began = time.perf_counter()
    for _ in islice(batches, STEPS):
        pass
    took = time.perf_counter() - began
    return STEPS * BATCH / took


def cold(blocks: Path, cache: Path) -> float:
    """As `paced`, from a server far away and an empty cache on."""
    context = multiprocessing.get_context("spawn")
    ours_end, theirs = context.Pipe()
    server = context.Process(target=serve, args=(blocks, theirs), daemon=True)
    server.start()
    port = ours_end.recv()
    share = paced(ours(streamed(f"http://127.0.0.1:{port}", cache)))
    server.kill()
    return share


def paced(batches: Iterator[Any]) -> float:
    """Share of the time that a training of 200-ms steps spends on getting its batches, after the first one:
    waiting for it, and normalising it, which on a CPU is done then."""
    next(batches)
    waited, began = 0.0, time.perf_counter()
    for _ in range(STEPS):
        before = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - before
        time.sleep(STEP_S)
    return waited / (time.perf_counter() - began)


def serve(folder: Path, port: Any) -> None:
    """Files by HTTP, far away."""
    lock, free_at = threading.Lock(), [0.0]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            file = folder / self.path.lstrip("/")
            time.sleep(LATENCY_S)
            content = file.read_bytes() if file.is_file() else b""
            self.send_response(200 if content else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            for begin in range(0, len(content), 2**17):
                piece = content[begin : begin + 2**17]
                with lock:
                    free_at[0] = max(free_at[0], time.monotonic()) + len(piece) / BYTES_A_S
                    wait = free_at[0] - time.monotonic()
                time.sleep(max(wait, 0))
                self.wfile.write(piece)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        port.send(server.server_address[1])
        server.serve_forever()


if __name__ == "__main__":
    main()
