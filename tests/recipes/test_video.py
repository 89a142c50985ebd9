"""Boxes on a video: its frames, as they are written, and which of them are one object."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from clips import HEIGHT, RATE, WIDTH, paths, write_clip
from torch import Tensor
from torchvision.ops import box_iou
from trackers.eval.evaluate import evaluate_mot_sequence

from ddptrain.api import UserError
from ddptrain.api.world import World
from ddptrain.data.detection.augment import DetectionAugment
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes
from ddptrain.recipes.detection.detections import Detections
from ddptrain.recipes.detection.video import filmed, names_video

OBJECTS, FRAMES, SCALE = 6, 300, 0.5
"""SCALE: of a frame in its square."""


@pytest.fixture(scope="module")
def data() -> DetectionData:
    data = DetectionData(DrawnScenes(train=1, valid=1, size=64), DetectionAugment())
    data.load_metadata({"classes": ["square", "disc"], "size": 160}, World())
    return data


def seen(truth: Tensor) -> list[Tensor]:
    """Of each frame (k, 5) boxes and scores: shaken, unsure at times, and each object missed now and then."""
    draw = torch.Generator().manual_seed(1)
    missed = torch.zeros(len(truth), OBJECTS, dtype=torch.bool)
    for i in range(OBJECTS):
        for begin in torch.randint(20, len(truth), (6,), generator=draw).tolist():
            missed[begin : begin + 7, i] = True
    boxes = truth + torch.randn(truth.shape, generator=draw)
    scores = 0.15 + 0.8 * torch.rand(*truth.shape[:2], 1, generator=draw)
    return [torch.cat([boxes[i], scores[i]], dim=1)[~missed[i]] for i in range(len(truth))]


def detector(frames: Sequence[Tensor]) -> Callable[[Tensor, float], list[Detections]]:
    """Says of the frames, one after the other, what is known; each box also as of the other class."""
    coming = iter(frames)

    def detect(images: Tensor, least_score: float) -> list[Detections]:
        assert images.shape == (1, 3, 160, 160)
        rows = next(coming)
        rows = rows[rows[:, 4] >= least_score]
        rows = rows[rows[:, 4].argsort(descending=True)]
        corner = torch.tensor([0.0, (160 - HEIGHT * SCALE) / 2]).repeat(2)
        boxes = torch.cat([rows[:, :4], rows[:, :4]]) * SCALE + corner
        scores = torch.cat([rows[:, 4], rows[:, 4] * 0.9])
        labels = torch.arange(2).repeat_interleave(len(rows))
        order = scores.argsort(descending=True)
        return [Detections(boxes[order], scores[order], labels[order])]

    return detect


def written(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "detections.jsonl").read_text().splitlines()]


def as_mot(frames: Sequence[Sequence[tuple[int, Sequence[float]]]], file: Path) -> Path:
    """MOT Challenge's text: frame, track, left, top, width, height, confidence."""
    lines = [
        f"{number},{track},{x1},{y1},{x2 - x1},{y2 - y1},1,1,1"
        for number, frame in enumerate(frames, 1)
        for track, (x1, y1, x2, y2) in frame
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def by_nearest_box(frames: Sequence[Tensor]) -> list[list[tuple[int, list[float]]]]:
    """Each box goes on with the track whose last one it overlaps most, if any."""
    tracks: dict[int, list[float]] = {}
    answer = []
    for rows in frames:
        boxes, frame, taken = rows[:, :4], [], set()
        known = list(tracks)
        overlaps = box_iou(boxes, torch.tensor([tracks[i] for i in known]).view(-1, 4))
        for box, row in zip(boxes.tolist(), overlaps, strict=True):
            free = [(float(row[j]), i) for j, i in enumerate(known) if i not in taken and row[j] > 0]
            track = max(free)[1] if free else len(tracks) + len(frame) + 1000 * len(answer)
            taken.add(track)
            frame.append((track, box))
        tracks = {**tracks, **dict(frame)}
        answer.append(frame)
    return answer


@pytest.mark.long
def test_tracks_are_better_than_by_the_nearest_box(data: DetectionData, tmp_path: Path) -> None:
    truth = paths(OBJECTS, FRAMES)
    write_clip(tmp_path / "clip.mp4", truth)
    frames = seen(truth)
    *_, last = filmed(detector(frames), data, str(tmp_path / "clip.mp4"), tmp_path / "out", 0.25, "bytetrack")
    assert f"{FRAMES} frames, " in last
    tracked = [
        [(one["track"], one["box"]) for one in line["objects"] if one["track"] is not None]
        for line in written(tmp_path / "out")
    ]
    true = as_mot([list(enumerate(frame.tolist())) for frame in truth], tmp_path / "true.txt")
    scores = []
    for name, answer in (("ours", tracked), ("nearest", by_nearest_box(frames))):
        result = evaluate_mot_sequence(true, as_mot(answer, tmp_path / f"{name}.txt"), ["HOTA", "Identity"])
        assert result.HOTA is not None
        assert result.Identity is not None
        scores.append((result.HOTA.HOTA, result.Identity.IDF1))
    (hota, idf1), (plain_hota, plain_idf1) = scores
    assert hota > plain_hota + 0.1
    assert idf1 > plain_idf1 + 0.1
    with av.open(str(tmp_path / "out/clip.mp4")) as film:
        assert [len(list(film.decode(video=0))), film.streams.video[0].average_rate] == [FRAMES, RATE]


@pytest.mark.parametrize("seconds", [0.0, 0.95, 1.2, 60.0])
def test_a_stream_that_stalls_ends_no_track(seconds: float, data: DetectionData, tmp_path: Path) -> None:
    truth = paths(1, 1).expand(20, -1, -1)
    write_clip(tmp_path / "clip.mp4", truth, gap=(10, seconds))
    frames = [torch.tensor([[*box, 0.9]]) for [box] in truth.tolist()]
    source = str(tmp_path / "clip.mp4")
    list(filmed(detector(frames), data, source, tmp_path / "out", 0.25, "bytetrack"))
    lines = written(tmp_path / "out")
    assert lines[10]["time"] == pytest.approx(10 / RATE + seconds, abs=1 / RATE)
    assert len({one["track"] for line in lines[2:] for one in line["objects"]} - {None}) == 1
    assert all(one["track"] is not None for line in lines[2:] for one in line["objects"])


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_each_box_is_where_it_was_seen(
    codec: str, data: DetectionData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(av, "codecs_available", {codec})  # builds of FFmpeg may lack x264
    truth = paths(2, 5)
    write_clip(tmp_path / "clip.avi", truth, codec="mpeg4")
    frames = [torch.cat([boxes, torch.tensor([[0.9], [0.2]])], dim=1) for boxes in truth]
    list(filmed(detector(frames), data, str(tmp_path / "clip.avi"), tmp_path / "out", 0.25, "none"))
    lines = written(tmp_path / "out")
    assert [line["frame"] for line in lines] == list(range(5))
    assert [line["time"] for line in lines] == pytest.approx([i / RATE for i in range(5)])
    for line, boxes in zip(lines, truth, strict=True):
        square, disc = line["objects"]  # the other one is not sure enough
        assert square["class"] == "square"
        assert disc["class"] == "disc"
        assert square["track"] is None
        assert square["box"] == pytest.approx(boxes[0].tolist(), abs=0.02)


def test_a_video_that_is_cut_or_changes_its_size(data: DetectionData, tmp_path: Path) -> None:
    """The frames that there are, in a film of one size."""
    truth = paths(1, 40)
    write_clip(tmp_path / "one.ts", truth, codec="mpeg2video")
    write_clip(tmp_path / "two.ts", truth, (160, 128), codec="mpeg2video")
    whole = (tmp_path / "one.ts").read_bytes()
    (tmp_path / "cut.ts").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "both.ts").write_bytes(whole + (tmp_path / "two.ts").read_bytes())
    for name, least, most in (("cut", 5, 39), ("both", 41, 80)):
        frames = [torch.tensor([[10.0, 10.0, 50.0, 50.0, 0.9]])] * 80
        source = str(tmp_path / f"{name}.ts")
        list(filmed(detector(frames), data, source, tmp_path / name, 0.25, "none"))
        assert least <= len(written(tmp_path / name)) <= most
        with av.open(str(tmp_path / f"{name}/{name}.mp4")) as film:
            sizes = {(frame.width, frame.height) for frame in film.decode(video=0)}
        assert sizes == {(WIDTH, HEIGHT)}


def test_frames_after_a_damaged_one_are_read(
    data: DetectionData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clip = tmp_path / "clip.mp4"
    write_clip(clip, paths(1, 20))
    with av.open(str(clip)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.pos is not None]
    content = bytearray(clip.read_bytes())
    begin, size = places[7]
    content[begin : begin + size] = b"\xff" * size
    clip.write_bytes(content)
    nothing = detector([torch.zeros(0, 5)] * 20)
    list(filmed(nothing, data, str(clip), tmp_path / "out", 0.25, "none"))
    assert len(written(tmp_path / "out")) == 19
    assert "1 packet could not be decoded" in caplog.text


def test_a_streams_password_is_not_told(data: DetectionData, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        list(filmed(detector([]), data, "rtsp://me:secret@127.0.0.1:9/x", tmp_path / "out", 0.25, "none"))
    assert str(caught.value).startswith("source=rtsp://***@127.0.0.1:9/x: can't be read as a video")


def test_sound_may_be_longer_than_the_pictures(
    data: DetectionData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "clip.mp4"
    with av.open(str(source), "w") as container:
        film, sound = container.add_stream("libx264", rate=25), container.add_stream("aac", rate=8000)
        film.width, film.height, film.pix_fmt = 64, 64, "yuv420p"
        for _ in range(25):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 90, np.uint8), format="rgb24")
            container.mux(film.encode(frame))
        container.mux(film.encode(None))
        for i in range(32):  # of 1024 samples: four seconds
            samples = av.AudioFrame.from_ndarray(
                np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
            )
            samples.sample_rate, samples.pts = 8000, 1024 * i
            container.mux(sound.encode(samples))
        container.mux(sound.encode(None))
    list(filmed(detector([torch.zeros(0, 5)] * 25), data, str(source), tmp_path / "out", 0.25, "none"))
    assert len(written(tmp_path / "out")) == 25
    assert "is it cut?" not in caplog.text


def test_a_video_of_a_phone_is_turned(data: DetectionData, tmp_path: Path) -> None:
    """Its header says by how much: here by 90 degrees clockwise, so that the left comes to lie above."""
    clip = tmp_path / "clip.mp4"
    write_clip(clip, torch.tensor([[[0, 0, 40, 20.0]]] * 3))
    content = clip.read_bytes()
    as_it_is = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    place = content.index(as_it_is, content.index(b"tkhd"))
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, HEIGHT << 16, 0, 1 << 30)
    clip.write_bytes(content[:place] + turned + content[place + len(turned) :])
    nothing = [torch.zeros(0, 5)] * 3
    list(filmed(detector(nothing), data, str(clip), tmp_path / "out", 0.25, "none"))
    with av.open(str(tmp_path / "out/clip.mp4")) as film:
        [first, *_] = film.decode(video=0)
    pixels = torch.from_numpy(first.to_ndarray(format="rgb24"))
    assert pixels.shape == (WIDTH, HEIGHT, 3)
    bright = (pixels[..., 1] > 160).nonzero()
    assert bright.amin(0).tolist() == pytest.approx([0, HEIGHT - 20], abs=2)
    assert bright.amax(0).tolist() == pytest.approx([39, HEIGHT - 1], abs=2)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "Invalid data"), (b"text" * 99, "Invalid data"), (None, "No such file")],
)
def test_what_is_no_video(content: bytes | None, said: str, data: DetectionData, tmp_path: Path) -> None:
    source = tmp_path / "clip.mp4"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(UserError, match=f"source=.*clip.mp4: can't be read as a video .{said}"):
        list(filmed(detector([]), data, str(source), tmp_path / "out", 0.25, "none"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "video"),
    [
        ("a.mp4", True),
        ("A.MOV", True),
        ("rtsp://x/y", True),
        ("camera", True),
        ("rtsp://10.0.0.5/cam?channel=1", True),
        ("rtsp://[::1]/x", True),
        ("clip [a1].mp4", True),  # is there
        ("other [a1].mp4", False),  # a pattern
        ("*.mp4", False),
        ("folder.mp4", False),
        ("pictures", False),
        ("a.png", False),
    ],
)
def test_what_is_taken_for_a_video(
    source: str, video: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clip [a1].mp4").touch()
    Path("folder.mp4").mkdir()
    assert names_video(source) == video
    with pytest.raises(UserError, match="is a picture elsewhere"):
        names_video("https://example.org/street.JPG?size=1")
    Path("camera").mkdir()
    assert not names_video("camera")
