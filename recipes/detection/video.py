"""Boxes on a video: a file, a stream or a camera. Drawn, as JSON lines, and with tracks."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, final
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from ddptrain.api import UserError
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.pictures import ENDINGS as PICTURES
from ddptrain.data.pictures import claim
from ddptrain.data.stream.store import shown
from ddptrain.recipes.detection.detections import Detections, without_doubles
from ddptrain.recipes.detection.draw import annotated
from ddptrain.recipes.detection.predict import within
from ddptrain.text import counted

log = logging.getLogger("ddptrain")

ENDINGS = (
    *(".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".ts"),
    *(".mts", ".m2ts", ".wmv", ".flv", ".3gp", ".ogv", ".vob"),
)
_CAMERA = "/dev/video0"
_USUAL_RATE = Fraction(30)
"""Frames a second, where a stream does not say."""
_TICK = Fraction(1, 60_000)
"""Seconds, in which a film counts: MPEG-4 takes no finer ones than 1/65535."""
_LEAST_TRACKED = 0.1
"""Score of detections that may go on with a track, though they are not sure enough to begin one."""
_ONE_OBJECT = 0.7
"""IoU above which boxes of two classes are those of one object."""
_NO_TRACK = -1
_KEPT_S = 1.0
"""For which a track that is not seen is kept; but for two frames at least."""
_GAP = 0.9
"""Of that time, counted for a longer gap between two frames: a stream that stalls ends no track that was seen
in the frame before."""

Track = Literal["none", "bytetrack"]


def names_video(source: str) -> bool:
    """Whether it names a video and not pictures. Raises UserError for a picture's address."""
    if "://" in source and Path(urlsplit(source).path).suffix.lower() in PICTURES:
        raise UserError(f"source={source}: is a picture elsewhere. Download it and name the file.")
    if "://" in source or source.startswith("/dev/video"):
        return True
    if source == "camera":
        return not Path(source).exists()
    path, is_pattern = Path(source), any(letter in source for letter in "*?[")
    return path.suffix.lower() in ENDINGS and not path.is_dir() and (path.is_file() or not is_pattern)


def filmed(
    detect: Callable[[Tensor, float], Sequence[Detections]],
    data: DetectionData,
    source: str,
    out: Path,
    least_score: float,
    track: Track,
) -> Iterator[str]:
    """How fast it goes, a line a second. A camera and a stream go on until they end or Ctrl-C.

    Under ``out``: the video with boxes drawn in, as ``<name>.mp4``, and ``detections.jsonl``: of each frame
    its number, its time in seconds, and its objects with class, score, box (x1, y1, x2, y2 in pixels) and the
    number of their track, null where they have none (yet).

    detect: gives each picture's detections of a batch of pictures and a least score.
    """
    try:
        import av
    except ImportError as error:
        raise UserError(f"source={source}: a video needs av: pip install 'ddptrain[video]'") from error
    frames = _frames(source)
    first = next(frames)  # before anything is written
    claim(out)
    tracks = _Tracks(least_score, first.rate) if track == "bytetrack" else None
    path = Path(urlsplit(source).path if "://" in source else source)
    name = path.stem if path.suffix else "camera"
    begun = reported = time.perf_counter()
    count = 0
    try:
        with (
            av.open(str(out / f"{name}.mp4"), "w") as container,
            (out / "detections.jsonl").open("w", encoding="utf-8") as lines,
            closing(_Film(container, first.rate, first.aspect)) as film,
        ):
            for frame in chain([first], frames):
                image, placed = data.model_input(frame.pixels)
                [seen] = detect(image, least_score if tracks is None else min(least_score, _LEAST_TRACKED))
                detected, _ = within(placed.back(seen.boxes), seen, frame.pixels.shape[1:])
                numbers = [_NO_TRACK] * len(detected.labels)
                if tracks is not None:
                    detected, numbers = tracks.update(detected, frame.time)
                marks = ["" if number == _NO_TRACK else f"#{number}" for number in numbers]
                film.add(annotated(frame.pixels, detected, data.classes, marks=marks), frame.time)
                lines.write(json.dumps(_as_json(count, frame, detected, numbers, data.classes)) + "\n")
                count += 1
                if (now := time.perf_counter()) - reported >= 1:
                    reported = now
                    yield f"{shown(source)}: {count} frames, {count / (now - begun):.1f} frames/s\n"
    except (av.error.FFmpegError, OSError) as error:
        raise UserError(f"out={out}: can't be written ({error.strerror}).") from error
    speed = count / (time.perf_counter() - begun)
    yield f"{out}: {name}.mp4 and detections.jsonl, {count} frames, {speed:.1f} frames/s"


class _Frame(NamedTuple):
    """pixels: uint8 (3, H, W), turned as they are to be seen. time: in seconds from the first frame on. rate:
    frames a second. aspect: width of a pixel to its height."""

    pixels: Tensor
    time: float
    rate: Fraction
    aspect: Fraction


def _frames(source: str) -> Iterator[_Frame]:
    """Raises UserError where there is none. What can't be decoded is left out, and a source that can't be
    read any further ends them, each with a warning."""
    import av

    address, form = (_CAMERA if source == "camera" else source), None
    where = shown(source)
    if address.startswith("/dev/video"):
        form = "v4l2"
    elif Path(address).is_file():
        address = f"file:{address}"  # a colon in its name is no protocol
    count, damaged, begin, elapsed = 0, 0, 0.0, 0.0
    try:
        with av.open(address, format=form) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None:
                raise UserError(f"source={where}: has no pictures, only sound or data.")
            stream.thread_type = "AUTO"
            rate = stream.average_rate or _USUAL_RATE
            for packet in container.demux(stream):
                try:
                    decoded = packet.decode()
                except av.error.InvalidDataError:
                    damaged += 1
                    continue
                for frame in decoded:
                    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
                    pixels = torch.rot90(pixels, frame.rotation // 90, (1, 2))  # as phones note it
                    aspect = stream.sample_aspect_ratio or Fraction(1)
                    if count == 0:
                        begin = frame.time or 0.0
                    else:  # what follows has a later time, whatever the file says
                        known = elapsed if frame.time is None else frame.time - begin
                        elapsed = known if known > elapsed else elapsed + float(1 / rate)
                    count += 1
                    yield _Frame(pixels, elapsed, rate, 1 / aspect if frame.rotation % 180 else aspect)
            # in seconds; a stream and some files don't say; sound may be longer than the pictures
            length = (container.duration or 0) / 1e6
            if stream.duration and stream.time_base:
                length = float(stream.duration * stream.time_base)
            if elapsed + max(1.0, 2 / float(rate)) < length:
                message = "note       source=%s: ends after %.1f of %.1f s; is it cut?"
                log.warning(message, where, elapsed, length)
    except (av.error.FFmpegError, OSError) as error:
        if count == 0:
            raise UserError(f"source={where}: can't be read as a video ({error.strerror}).") from error
        log.warning("note       source=%s: ends after %d frames (%s)", where, count, error.strerror)
    if count == 0:
        raise UserError(f"source={where}: has no frames{' that can be decoded' * (damaged > 0)}.")
    if damaged:
        log.warning("note       source=%s: %s could not be decoded", where, counted(damaged, "packet"))


@final
class _Film:
    """A video that is written frame by frame, all of the first one's size. Closed also at Ctrl-C: what there
    is can be looked at."""

    def __init__(self, container: Any, rate: Fraction, aspect: Fraction) -> None:
        from av import codecs_available

        self._container = container
        codec = "libx264" if "libx264" in codecs_available else "mpeg4"
        self._stream = container.add_stream(codec, rate=rate)
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = _TICK
        self._stream.codec_context.sample_aspect_ratio = aspect
        self._size: list[int] | None = None
        self._last = -1
        """Time of the last frame, in ticks."""

    def add(self, pixels: Tensor, at: float) -> None:
        """pixels: uint8 (3, H, W). at: seconds, more than before."""
        from av import VideoFrame

        if self._size is None:
            self._size = [side + side % 2 for side in pixels.shape[1:]]  # as the codec needs them
            self._stream.height, self._stream.width = self._size
        if list(pixels.shape[1:]) != self._size:
            pixels = functional.resize(pixels, self._size)
        frame = VideoFrame.from_ndarray(pixels.permute(1, 2, 0).contiguous().numpy(), format="rgb24")
        self._last = max(round(at / _TICK), self._last + 1)  # two times may round to one tick
        frame.pts, frame.time_base = self._last, _TICK
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        if self._size is not None:
            self._container.mux(self._stream.encode(None))


@final
class _Tracks:
    """Detections of successive frames that are the same object, by ByteTrack (Zhang et al., arXiv 2110.06864)
    of the library trackers."""

    def __init__(self, least_score: float, rate: Fraction) -> None:
        try:
            from trackers import ByteTrackTracker
        except ImportError as error:
            raise UserError(f"track=bytetrack: needs {error.name}: pip install 'ddptrain[video]'") from error
        kept_s = max(_KEPT_S, 2 / float(rate))
        self._tracker = ByteTrackTracker(
            frame_rate=float(rate),
            track_activation_threshold=least_score,
            high_conf_det_threshold=least_score,
            lost_track_buffer=math.ceil(kept_s * 30),  # the library counts in frames of 30 a second
        )
        self._least_score = least_score
        self._longest_gap = _GAP * kept_s
        self._before = self._clock = 0.0
        """When the last frame was, and when by the tracker's clock."""

    def update(self, detected: Detections, at: float) -> tuple[Detections, list[int]]:
        """Those of a frame, ``at`` so many seconds, that are sure enough or have a track, and each one's
        track."""
        import supervision

        # an object is of one class, the likeliest
        one_class = torch.zeros_like(detected.labels)
        kept = without_doubles(detected.boxes, detected.scores, one_class, _ONE_OBJECT)
        single = detected.where(kept)
        given = supervision.Detections(
            xyxy=single.boxes.numpy(), confidence=single.scores.numpy(), class_id=single.labels.numpy()
        )
        self._clock += min(at - self._before, self._longest_gap)
        self._before = at
        tracked = self._tracker.update(given, timestamp=self._clock)
        if not len(tracked):
            return detected.where(slice(0)), []
        all_of = Detections(*map(torch.from_numpy, (tracked.xyxy, tracked.confidence, tracked.class_id)))
        numbers = torch.from_numpy(tracked.tracker_id)
        shown = (numbers != _NO_TRACK) | (all_of.scores >= self._least_score)
        return all_of.where(shown), numbers[shown].tolist()


def _as_json(
    number: int, frame: _Frame, detected: Detections, numbers: Sequence[int], classes: Sequence[str]
) -> dict[str, Any]:
    columns = detected.boxes.tolist(), detected.scores.tolist(), detected.labels.tolist()
    rows = zip(*columns, numbers, strict=True)
    objects = [
        {
            "class": classes[label],
            "score": round(score, 4),
            "box": [round(side, 2) for side in box],
            "track": None if track == _NO_TRACK else track,
        }
        for box, score, label, track in rows
    ]
    return {"frame": number, "time": frame.time, "objects": objects}
