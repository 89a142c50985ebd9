"""Boxes against pixels: of scenes the program draws, and of what augmentation makes of pictures."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scenes import Oblong
from torch import Tensor

from ddptrain.api.sampler import Sampler
from ddptrain.api.world import World
from ddptrain.data.detection.augment import BoxDraws, BoxedImage, DetectionAugment
from ddptrain.data.detection.batch import Batch, Sample, coloured, stacked
from ddptrain.data.detection.data import DetectionData
from ddptrain.data.detection.drawn import DrawnScenes, draw_scenes
from ddptrain.data.detection.letterbox import GREY, letterbox
from ddptrain.data.detection.source import Scenes
from ddptrain.data.images.shapes import DISTANCES
from ddptrain.errors import UserError

PLAIN = dict.fromkeys(DetectionAugment.__dataclass_fields__, 0.0)
"""An augmentation that does nothing."""
PAINTS = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [255, 0, 255], [0, 255, 255]])


def slow_owners(seed: int, side: int, scenes: int) -> Iterator[tuple[Tensor, list[int]]]:
    """Which shape is seen at each pixel of the first scenes, painted one by one; and the shapes' labels. The
    numbers are drawn in `draw_scenes`' order."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(200, *shape, generator=generator)

    rand(3)
    for shape in ((1, 1), (1, 1), (3, 1, 1), *((1, 1), (1, 1), (1, 1), (3, 1, 1)) * 4):  # the background
        rand(*shape)
    wanted = torch.randint(1, 13, (200,), generator=generator).tolist()
    labels = torch.randint(10, (200, 20), generator=generator).tolist()
    radius = (7 * 4 ** rand(20)).tolist()  # 7 to 28, evenly in the logarithm
    angle = (2 * math.pi * rand(20)).tolist()
    centre = ((0.04 + 0.92 * rand(20, 2)) * side).tolist()
    margin = 40
    at = torch.arange(-margin, side + margin, dtype=torch.float64) + 0.5
    inner = slice(margin, margin + side)
    for i in range(scenes):
        owner, whole, painted = torch.full((side, side), -1), [], []
        for k in range(20):
            if len(painted) == wanted[i]:
                break
            dx, dy = at[None, :] - centre[i][k][0], at[:, None] - centre[i][k][1]
            cosine, sine, size = math.cos(angle[i][k]), math.sin(angle[i][k]), radius[i][k]
            formula = DISTANCES[list(DISTANCES)[labels[i][k]]]
            covered = formula((cosine * dx + sine * dy) / size, (cosine * dy - sine * dx) / size) < 0
            after = torch.where(covered[inner, inner], len(painted), owner)
            sizes = [*whole, int(covered.sum())]
            if all(int((after == number).sum()) >= 0.5 * of for number, of in enumerate(sizes)):
                owner, whole = after, sizes
                painted.append(labels[i][k])
        yield owner, painted


@pytest.mark.parametrize("side", [64, 100])
def test_drawn_boxes_hold_what_is_seen_to_the_pixel(side: int) -> None:
    images, found = draw_scenes(torch.Generator().manual_seed(5), 200, side)
    assert images.shape == (200, 3, side, side)
    assert {len(one) for one in found} >= set(range(1, 9))
    for (owner, painted), objects in zip(slow_owners(5, side, 12), found, strict=False):
        assert objects.labels.tolist() == painted
        for number, box in enumerate(objects.boxes.tolist()):
            seen = torch.nonzero(owner == number)
            (y1, x1), (y2, x2) = seen.amin(0).tolist(), seen.amax(0).tolist()
            assert box == [x1, y1, x2 + 1, y2 + 1]
    for objects in found:
        assert 1 <= len(objects) <= 12
        assert not objects.crowd.any()
        assert 0 <= objects.boxes.min() <= objects.boxes.max() <= side
        assert (objects.boxes[:, 2:] - objects.boxes[:, :2]).min() >= 2


def scenes_of(train: int) -> Scenes:
    return DrawnScenes(train=train, valid=1, size=64).open(Path("nowhere")).train


@pytest.mark.long
def test_a_scene_does_not_depend_on_how_many_are_drawn_nor_on_threads() -> None:
    few, many = scenes_of(3), scenes_of(203)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    other = scenes_of(203)
    torch.set_num_threads(threads)
    for i in range(203):
        assert torch.equal(many.image(i), other.image(i))
        assert torch.equal(many.objects[i].boxes, other.objects[i].boxes)
    for i in range(3):
        assert torch.equal(few.image(i), many.image(i))
        assert torch.equal(few.objects[i].boxes, many.objects[i].boxes)
    assert not torch.equal(many.image(0), many.image(200))


def painted(height: int, width: int, first: int, count: int) -> BoxedImage:
    """Solid rectangles on grey, apart from each other; each its own colour, of which its label tells."""
    pixels = torch.full((3, height, width), GREY, dtype=torch.uint8)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    boxes = []
    for j in range(count):
        x1, x2 = round((j + 0.1) * width / count), round((j + 0.9) * width / count)
        y1, y2 = round(height * (0.1 + 0.2 * j)), round(height * (0.6 + 0.1 * j))
        pixels[:, y1:y2, x1:x2] = PAINTS[(first + j) % 6].to(torch.uint8)[:, None, None]
        masks[j, y1:y2, x1:x2] = 1
        boxes.append([x1, y1, x2, y2])
    return BoxedImage(pixels, torch.tensor(boxes).float().view(-1, 4), first + torch.arange(count), masks)


def shows(pixels: Tensor, label: int) -> Tensor:
    """bool (h, w): where this colour makes up more than half of a pixel."""
    away = PAINTS[label].float() - GREY
    share = ((pixels.float() - GREY) * away[:, None, None]).sum(0) / away.pow(2).sum()
    others = [(pixels.float() - paint[:, None, None]).abs().sum(0) for paint in PAINTS.float()]
    return (share > 0.5) & (torch.stack(others).argmin(0) == label)


def extent(pixels: Tensor, label: int) -> list[float] | None:
    seen = torch.nonzero(shows(pixels, label))
    if not len(seen):
        return None
    (y1, x1), (y2, x2) = seen.amin(0).tolist(), seen.amax(0).tolist()
    return [x1, y1, x2 + 1, y2 + 1]


def check_masks(sample: BoxedImage, edge: int) -> None:
    """Each shows its object's colour, and the colour is shown by it, but for so many pixels at the edge."""
    assert sample.masks is not None
    assert sample.masks.dtype == torch.uint8
    assert sample.masks.shape == (len(sample.labels), SIDE, SIDE)
    assert int(sample.masks.max() if len(sample.masks) else 0) <= 1
    for mask, label in zip(sample.masks.float(), sample.labels.tolist(), strict=True):
        seen = shows(sample.pixels, label).float()
        for one, other in ((mask, seen), (seen, mask)):
            wider = torch.nn.functional.max_pool2d(other[None], 2 * edge + 1, 1, edge)[0]
            assert (one <= wider).all()


SIDE = 128
shares = st.sampled_from([0.0, 0.3, 0.5])


def drawn(seed: int) -> BoxDraws:
    random.seed(seed)
    return BoxDraws.draw()


def applied(
    augment: DetectionAugment, seed: int, mosaic: bool
) -> tuple[list[BoxedImage], BoxedImage, BoxDraws]:
    if mosaic:
        tiles = [
            painted(128, 96, 0, 2),
            painted(64, 128, 2, 2),
            painted(128, 128, 4, 1),
            painted(40, 128, 5, 1),
        ]
    else:
        tiles = [painted(128, 100, seed % 5, 2)]
    draws = drawn(seed)
    return tiles, augment.apply(tiles, draws, SIDE), draws


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**30), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), shares, shares, st.booleans())
def test_boxes_stay_on_their_objects(
    seed: int, mosaic: bool, zoom: float, shift: float, flip: float, vertical: bool
) -> None:
    changes = {
        "zoom": zoom / 2,
        "shift": shift,
        "horizontal_flip": flip,
        "vertical_flip": float(vertical),
        "keep": 0.2,
    }
    tiles, sample, draws = applied(DetectionAugment(**PLAIN | changes), seed, mosaic)
    check_masks(sample, edge=1)
    pixels, boxes, labels, _ = sample
    without_masks = DetectionAugment(**PLAIN | changes).apply(
        [tile._replace(masks=None) for tile in tiles], draws, SIDE
    )
    assert without_masks.masks is None
    assert torch.equal(without_masks.pixels, pixels)
    assert torch.equal(without_masks.boxes, boxes)
    assert pixels.shape == (3, SIDE, SIDE)
    assert len(set(labels.tolist())) == len(labels) == len(boxes)
    for box, label in zip(boxes, labels.tolist(), strict=True):
        seen = extent(pixels, label)
        assert seen is not None
        torch.testing.assert_close(box, torch.tensor(seen).float(), rtol=0, atol=1.5)
        assert (box[2:] - box[:2]).min() >= 2
    everything = DetectionAugment(**PLAIN | changes | {"keep": 0.0})
    for box, label in zip(*applied(everything, seed, mosaic)[1][1:3], strict=True):
        whole = next(tile.boxes[tile.labels == label][0] for tile in tiles if label in tile.labels)
        magnified = SIDE / round(SIDE / (1 - zoom / 2 + zoom * draws.zoom))
        left = float((box[2:] - box[:2]).prod() / (whole[2:] - whole[:2]).prod()) / magnified**2
        assert abs(left - 0.2) < 1e-3 or (left >= 0.2) == (int(label) in labels.tolist())


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**30), st.booleans(), st.sampled_from([(30.0, 0.0), (0.0, 30.0), (180.0, 20.0)]))
def test_boxes_grow_with_what_is_turned_and_slanted(
    seed: int, mosaic: bool, most: tuple[float, float]
) -> None:
    augment = DetectionAugment(**PLAIN | {"degrees": most[0], "shear": most[1], "zoom": 0.3})
    _, sample, _ = applied(augment, seed, mosaic)
    check_masks(sample, edge=2)  # a slanted corner is thin
    pixels, boxes, labels, _ = sample
    for label in range(6):
        seen = extent(pixels, label)
        x1, y1, x2, y2 = seen or (0, 0, 0, 0)
        if min(x2 - x1, y2 - y1) < 4:
            continue
        [box] = boxes[labels == label].tolist()
        assert box[0] - 1.5 <= x1 < x2 <= box[2] + 1.5
        assert box[1] - 1.5 <= y1 < y2 <= box[3] + 1.5


def test_masks_lie_where_their_objects_do_on_average() -> None:
    """torchvision's own nearest neighbour moves them by up to half a pixel of the picture, always to one
    side."""
    augment, moved = DetectionAugment(**PLAIN | {"zoom": 0.5, "keep": 0.9}), []
    for seed in range(60):
        _, sample, draws = applied(augment, seed, mosaic=False)
        assert sample.masks is not None
        if draws.zoom > 0.5:
            continue  # smaller only, where a pixel stands for several
        for mask, label in zip(sample.masks, sample.labels.tolist(), strict=True):
            seen = shows(sample.pixels, label)
            moved.append(mask.nonzero().float().mean(0) - seen.nonzero().float().mean(0))
    assert len(moved) > 20
    assert torch.stack(moved).mean(0).abs().max() < 0.08


def test_what_the_mosaics_edge_hides_counts_as_cut_off_also_where_pictures_are_turned() -> None:
    """At most a sixth of an object reaches onto the canvas: too little, however little that is turned."""
    grey = torch.full((3, SIDE, SIDE), GREY, dtype=torch.uint8)
    empty = BoxedImage(grey, torch.zeros(0, 4), torch.zeros(0).long())
    tiles = [BoxedImage(grey, torch.tensor([[0.0, 40, 64, 80]]), torch.tensor([0])), empty, empty, empty]
    changes, shown = PLAIN | {"zoom": 0.5, "shift": 0.5}, 0
    for seed in range(1000):
        draws = drawn(seed)
        # pixels of the first tile that lie left of the canvas
        beyond = SIDE - round(SIDE * (0.5 + draws.middle_x))
        if 54 <= beyond <= 60 and len(DetectionAugment(**changes).apply(tiles, draws, SIDE).labels):
            shown += 1
            for degrees in (0.0, 0.01):
                augment = DetectionAugment(**changes | {"degrees": degrees, "keep": 0.2})
                assert not len(augment.apply(tiles, draws, SIDE).labels), (seed, degrees)
    assert shown


def test_mosaics_are_a_share_of_the_samples_until_they_end() -> None:
    augment = DetectionAugment(mosaic=0.5, mosaic_until=0.8)
    tiles = [augment.tiles(drawn(i), i, range(500), 0.79) for i in range(500)]
    four = [of for of in tiles if len(of) == 4]
    assert {len(of) for of in tiles} == {1, 4}
    assert 200 < len(four) < 300
    assert all(of[0] == i for i, of in enumerate(tiles))
    assert len({tile for of in four for tile in of[1:]}) > 200
    assert all(0 <= tile < 500 for of in four for tile in of)
    for progress in (0.8, 0.99):
        assert all(augment.tiles(drawn(i), i, range(500), progress) == [i] for i in range(500))


def test_a_share_of_the_samples_is_combined_with_another_until_mosaics_end() -> None:
    augment = DetectionAugment(mixup=0.3, copy_paste=0.2, mosaic_until=0.8)
    draws = [drawn(i) for i in range(1000)]
    partners = [augment.partner(of, range(10, 500), 0.79) for of in draws]
    combined = [i for i, partner in enumerate(partners) if partner is not None]
    assert 450 < len(combined) < 550
    assert len({partners[i] for i in combined}) > 200
    assert all(partner is None or 10 <= partner < 500 for partner in partners)
    one, other = painted(SIDE, SIDE, 0, 2), painted(SIDE, SIDE, 3, 0)
    changed = [not torch.equal(augment.combined(one, other, draws[i]).pixels, one.pixels) for i in combined]
    assert 250 < sum(changed) < 350, "the blends: the other has nothing to paste"
    for progress in (0.8, 0.99):
        assert all(augment.partner(of, range(500), progress) is None for of in draws)
    with pytest.raises(UserError, match=r"mixup=0.6 data.augment.copy_paste=0.5: .* at most 1 together"):
        DetectionAugment(mixup=0.6, copy_paste=0.5)


def test_a_blend_is_the_mean_of_two_with_the_objects_of_both() -> None:
    one, other = painted(SIDE, SIDE, 0, 2), painted(SIDE, SIDE, 3, 1)
    pixels, boxes, labels, masks = DetectionAugment(mixup=1.0).combined(one, other, drawn(0))
    assert one.masks is not None
    assert other.masks is not None
    assert masks is not None
    assert torch.equal(masks, torch.cat([one.masks, other.masks]))
    assert labels.tolist() == [0, 1, 3]
    assert torch.equal(boxes, torch.cat([one.boxes, other.boxes]))
    assert pixels.dtype == torch.uint8
    assert (pixels - (one.pixels.double() + other.pixels.double()) / 2).abs().max() <= 0.5


places = st.integers(0, 400).map(lambda q: q / 4)
lengths = st.integers(8, 200).map(lambda q: q / 4)


def on_the_picture(found: list[tuple[float, ...]]) -> Tensor:
    boxes = [[x, y, min(x + w, SIDE), min(y + h, SIDE)] for x, y, w, h in found]
    return torch.tensor(boxes).view(-1, 4)


some_boxes = st.lists(st.tuples(places, places, lengths, lengths), max_size=5).map(on_the_picture)


def noise(boxes: Tensor, first: int, draw: torch.Generator) -> BoxedImage:
    pixels = torch.randint(256, (3, SIDE, SIDE), generator=draw).to(torch.uint8)
    masks = torch.randint(2, (len(boxes), SIDE, SIDE), generator=draw).to(torch.uint8)
    return BoxedImage(pixels, boxes, first + torch.arange(len(boxes)), masks)


@settings(deadline=None, max_examples=80)
@given(some_boxes, some_boxes, st.integers(0, 2**20))
def test_pasted_objects_hide_little_and_nothing_else_changes(own: Tensor, its: Tensor, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    one, other = noise(own, 0, draw), noise(its, 100, draw)
    pixels, boxes, labels, masks = DetectionAugment(copy_paste=1.0).combined(one, other, drawn(0))
    assert one.masks is not None
    assert other.masks is not None
    assert masks is not None
    expected, there, names = one.pixels.clone(), own.tolist(), list(range(len(own)))
    still_seen, pasted = one.masks.clone(), []
    hidden = [0.0] * len(own)
    for i, (x1, y1, x2, y2) in enumerate(its.round().long().tolist()):
        after = [
            before + max(0.0, min(b[2], x2) - max(b[0], x1)) * max(0.0, min(b[3], y2) - max(b[1], y1))
            / ((b[2] - b[0]) * (b[3] - b[1]))
            for before, b in zip(hidden, own.tolist(), strict=True)
        ]  # fmt: skip
        assume(all(abs(share - 0.3) > 1e-5 for share in after))
        if max(after, default=0.0) <= 0.3:
            hidden = after
            expected[:, y1:y2, x1:x2] = other.pixels[:, y1:y2, x1:x2]
            there.append([x1, y1, x2, y2])
            names.append(100 + i)
            still_seen[:, y1:y2, x1:x2] = 0
            pasted.append(other.masks[i])
    assert torch.equal(pixels, expected)
    all_masks = [*still_seen, *pasted]
    seen = [i for i, mask in enumerate(all_masks) if mask.any()]
    assert [mask.tolist() for mask in masks] == [all_masks[i].tolist() for i in seen]
    assert boxes.tolist() == [there[i] for i in seen]
    assert labels.tolist() == [names[i] for i in seen]


def test_an_object_of_which_no_pixel_is_left_is_left_out() -> None:
    """A ladder across its box: a cut or a paste may leave a part of the box that it does not cross."""
    ladder = torch.eye(SIDE, dtype=torch.uint8)[None]
    whole = torch.tensor([[0.0, 0.0, SIDE, SIDE]])
    pixels = torch.zeros(3, SIDE, SIDE, dtype=torch.uint8)
    image = BoxedImage(pixels, whole, torch.tensor([7]), ladder)
    augment = DetectionAugment(**PLAIN | {"keep": 0.0})
    shown = [augment.apply([image] * 4, drawn(i), SIDE) for i in range(30)]
    for sample in shown:
        assert sample.masks is not None
        assert len(sample.boxes) == len(sample.labels) == len(sample.masks)
        assert sample.masks.flatten(1).any(1).all()
    assert any(len(sample.boxes) < 4 for sample in shown)


def test_colours_turn_saturate_and_scale() -> None:
    def colours(**changes: float) -> Tensor:
        augment = DetectionAugment(**PLAIN | changes)
        return torch.stack([augment.colours(drawn(i)) for i in range(50)])

    torch.testing.assert_close(colours(), torch.eye(3).expand(50, 3, 3), rtol=0, atol=1e-5)
    grey, red = torch.ones(3) * 0.4, torch.tensor([0.5, 0.1, 0.1])
    for changes in ({"hue": 0.5}, {"saturation": 0.9}):
        turned = colours(**changes)
        torch.testing.assert_close(turned @ grey, grey.expand(50, 3), rtol=0, atol=1 / 255)
        assert (turned @ red - red).abs().amax(1).median() > 0.05
    values = colours(value=0.4)
    torch.testing.assert_close(values, values[:, :1, :1] * torch.eye(3), rtol=0, atol=1e-5)
    assert 0.6 <= values[:, 0, 0].min() < 0.7
    assert 1.3 < values[:, 0, 0].max() <= 1.4
    placed = letterbox(torch.tensor([[8, 8]]), 8).of(0)
    batch = stacked([Sample(painted(8, 8, 0, 2), values[0], 0, placed)])
    for channels_last in (False, True):
        images = coloured(batch, channels_last).images
        assert images.is_contiguous(memory_format=torch.channels_last) or not channels_last
        torch.testing.assert_close(images, (batch.images / 255 * values[0, 0, 0]).clamp(0, 1))


def loaded(
    resident: bool = True, workers: int = 0, size: tuple[int, int] = (45, 70), ranks: int = 1, rank: int = 0
) -> tuple[DetectionData, list[Batch]]:
    """The training batches of steps 2 to 7 of 8, over an epoch's end; mosaics end at step 4."""
    augment = DetectionAugment(mosaic=0.5, mosaic_until=0.5, degrees=5.0, mixup=0.3, copy_paste=0.3)
    data = DetectionData(Oblong(*size), augment, size=64, resident=resident, workers=workers)
    data.prepare(World(), seed=4)
    sampler = Sampler(data.train_size, 6, seed=4, rank=rank, world_size=ranks)
    return data, list(data.train_batches(sampler, range(2, 8)))


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip((*a[:5], *a.placed), (*b[:5], *b.placed), strict=True))


@pytest.mark.parametrize(
    ("size", "workers"),
    [((45, 70), 0), pytest.param((45, 70), 2, marks=pytest.mark.long), ((150, 90), 0)],
)
def test_pictures_in_memory_and_read_each_time_give_the_same_batches(
    size: tuple[int, int], workers: int
) -> None:
    data, resident = loaded(size=size)
    chunks = [range(3), range(3, 4)]
    other, read = loaded(resident=False, workers=workers, size=size)
    assert len(resident) == 6
    assert all(same(a, b) for a, b in zip(resident, read, strict=True))
    valid = zip(data.valid_batches(chunks), other.valid_batches(chunks), strict=True)
    assert all(same(a, b) for a, b in valid)


def test_ranks_share_the_batches_of_one() -> None:
    alone, halves = loaded()[1], [loaded(ranks=2, rank=rank)[1] for rank in (0, 1)]
    for step, batch in enumerate(alone):
        parts = [half[step] for half in halves]
        for of in ("images", "colours", "ids"):
            assert torch.equal(getattr(batch, of), torch.cat([getattr(part, of) for part in parts]))
        rows = [row for part in parts for row in zip(part.boxes, part.labels, strict=True)]
        for (boxes, labels), whole, its in zip(rows, batch.boxes, batch.labels, strict=True):
            assert torch.equal(labels[labels >= 0], its[its >= 0])
            assert torch.equal(boxes[labels >= 0], whole[its >= 0])
            assert not whole[its < 0].any()
