"""The complete IoU, which asks nothing of the device, against torchvision's, which does."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import complete_box_iou_loss

from ddptrain.recipes.yolo.boxes import boxes_at, complete_iou_loss

# in quarters of a pixel, so that distances and boxes are exact: left, top, width, height
spots, sides = st.integers(-80, 80), st.integers(0, 120)
some_boxes = st.tuples(spots, spots, sides, sides)
POINT = torch.zeros(1, 2, dtype=torch.float64)


def distances(box: tuple[int, ...]) -> Tensor:
    """float64 (1, 4): from the point (0, 0)."""
    x, y, width, height = (value / 4 for value in box)
    return torch.tensor([[-x, -y, x + width, y + height]], dtype=torch.float64)


@settings(deadline=None, max_examples=400)
@given(some_boxes, some_boxes)
@example((0, 0, 40, 40), (0, 0, 40, 40))
@example((0, 0, 40, 40), (40, 0, 40, 40))  # side by side
@example((0, 0, 40, 40), (40, 40, 8, 8))  # corner to corner
@example((0, 0, 40, 40), (60, 0, 8, 8))  # apart
@example((0, 0, 40, 40), (8, 8, 8, 8))  # within
@example((0, 0, 0, 40), (0, 0, 40, 0))  # lines
@example((0, 0, 40, 0), (0, 8, 40, 0))
@example((0, 0, 0, 0), (0, 0, 40, 20))
def test_the_complete_iou_and_its_gradient_are_torchvisions(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    seen, true = distances(a).requires_grad_(), distances(b)
    theirs = complete_box_iou_loss(boxes_at(POINT, seen), boxes_at(POINT, true))
    ours = complete_iou_loss(seen, true)
    assert ours.shape == (1,)
    assert ours.isfinite()
    if a[2:] == (0, 0) or b[2:] == (0, 0):  # torchvision's is NaN
        return
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    [our_slope] = torch.autograd.grad(ours.sum(), seen)
    assert our_slope.isfinite().all()
    single = complete_iou_loss(seen.detach().float(), true.float())
    torch.testing.assert_close(single.double(), ours.detach(), rtol=0, atol=5e-7)
    [their_slope] = torch.autograd.grad(theirs.sum(), seen)
    if a[3]:  # the slope of width / height is NaN where it is infinite
        torch.testing.assert_close(our_slope, their_slope, rtol=1e-9, atol=1e-9)
