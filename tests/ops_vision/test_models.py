"""A detector of torchvision's, which uses nms, batched_nms and roi_align on several levels of features."""

import copy

import pytest
import torch

pytest.importorskip("torchvision", reason="the vision pack's tests need torchvision")
import torchvision

from torchax_core.testing import sample


def detector():
    return torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=5,
        box_score_thresh=0.0,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_test=50,
    )


@pytest.mark.slow
def test_faster_rcnn_finds_the_same_boxes():
    # untrained, it scores all boxes nearly alike: in float32 their order is a matter of rounding
    model = detector().double().eval()
    images = [sample(size, torch.float64, low=0, high=1) for size in ((3, 120, 160), (3, 140, 100))]
    with torch.no_grad():
        expected = model(images)
        ours = copy.deepcopy(model).to("jax")([image.to("jax") for image in images])
    for one, other in zip(ours, expected, strict=True):
        assert one["labels"].cpu().tolist() == other["labels"].tolist()
        torch.testing.assert_close(one["scores"].cpu(), other["scores"])
        torch.testing.assert_close(one["boxes"].cpu(), other["boxes"])
