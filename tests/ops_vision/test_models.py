"""torchvision's detectors, small and with random weights: the same detections as on the CPU. They use nms, batched_nms and
roi_align on several levels of features, anchors, box coding, masks and keypoints pasted into images, topk and sorting."""

import copy
from collections import OrderedDict

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

import torchax_core
from torchax_core.testing import sample

CLASSES = 4
SIZE = {"min_size": 64, "max_size": 96}


class Features(nn.Module):
    """Two levels of features, 1/8 and 1/16 of the image's size."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.out_channels = channels
        self.first = nn.Sequential(nn.Conv2d(3, channels, 7, stride=8, padding=3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, stride=2, padding=1), nn.ReLU())

    def forward(self, x):
        first = self.first(x)
        return OrderedDict([("0", first), ("1", self.second(first))])


def anchors(per_level):
    return AnchorGenerator(per_level, ((0.5, 1.0, 2.0),) * len(per_level))


def region_arguments():
    """Of the detectors in two stages."""
    return {
        "rpn_anchor_generator": anchors(((16,), (32,))),
        "box_roi_pool": MultiScaleRoIAlign(["0", "1"], 3, 2),
        "box_head": TwoMLPHead(8 * 9, 16),
        "box_predictor": FastRCNNPredictor(16, CLASSES),
        "rpn_pre_nms_top_n_test": 40,
        "rpn_post_nms_top_n_test": 12,
        "box_score_thresh": 0.0,
        "box_detections_per_img": 6,
        **SIZE,
    }


def faster_rcnn():
    return detection.FasterRCNN(Features(), **region_arguments())


def mask_rcnn():
    return detection.MaskRCNN(
        Features(),
        mask_roi_pool=MultiScaleRoIAlign(["0", "1"], 4, 2),
        mask_head=MaskRCNNHeads(8, (8,), 1),
        mask_predictor=MaskRCNNPredictor(8, 8, CLASSES),
        **region_arguments(),
    )


def keypoint_rcnn():
    return detection.KeypointRCNN(
        Features(),
        keypoint_roi_pool=MultiScaleRoIAlign(["0", "1"], 4, 2),
        keypoint_head=KeypointRCNNHeads(8, (8,)),
        keypoint_predictor=KeypointRCNNPredictor(8, 5),
        **region_arguments(),
    )


def retinanet():
    generator = anchors(((16,), (32,)))
    return detection.RetinaNet(
        Features(),
        CLASSES,
        anchor_generator=generator,
        score_thresh=0.0,
        topk_candidates=30,
        detections_per_img=10,
        **SIZE,
    )


def fcos():
    generator = AnchorGenerator(((8,), (16,)), ((1.0,),) * 2)
    return detection.FCOS(
        # its head normalises in 32 groups
        Features(32),
        CLASSES,
        anchor_generator=generator,
        score_thresh=0.0,
        topk_candidates=30,
        detections_per_img=10,
        **SIZE,
    )


def ssd():
    features = Features()
    features.out_channels = [8, 8]
    generator = DefaultBoxGenerator([[2], [2]], scales=[0.2, 0.5, 0.9], steps=[8, 16])
    return SSD(features, generator, (64, 64), CLASSES, score_thresh=0.0, topk_candidates=30, detections_per_img=10)


DETECTORS = [faster_rcnn, mask_rcnn, keypoint_rcnn, retinanet, fcos, ssd]


def images():
    return [sample(size, torch.float64, low=0, high=1, seed=n) for n, size in enumerate([(3, 60, 80), (3, 70, 50)])]


def build(make):
    torch.manual_seed(0)
    # untrained, they score all boxes nearly alike: in float32 their order would be a matter of rounding
    return make().double().eval()


@pytest.mark.parametrize("make", DETECTORS, ids=lambda make: make.__name__)
def test_the_same_detections(make):
    model = build(make)
    with torch.no_grad():
        expected = model(images())
        ours = copy.deepcopy(model).to("jax")([image.to("jax") for image in images()])
    for one, other in zip(ours, expected, strict=True):
        assert one.keys() == other.keys() and len(other["boxes"]) > 3
        for name in other:
            assert one[name].device.type == "jax" and one[name].dtype == other[name].dtype
            torch.testing.assert_close(one[name].cpu(), other[name], msg=lambda m, name=name: f"{name}: {m}")


def targets():
    found = []
    for image in images():
        height, width = image.shape[1:]
        boxes = torch.tensor([[2.0, 3, width / 2, height / 2], [width / 3, 5, width - 4, height - 3]]).double()
        found.append({"boxes": boxes, "labels": torch.tensor([1, 3])})
    return found


@pytest.mark.parametrize("make", [retinanet, ssd], ids=lambda make: make.__name__)
def test_the_same_losses_and_gradients(make):
    model = build(make).train()
    twin = copy.deepcopy(model).to("jax")

    def losses(model, device):
        rows = [{name: value.to(device) for name, value in target.items()} for target in targets()]
        found = model([image.to(device) for image in images()], rows)
        sum(found.values()).backward()
        return found

    expected, ours = losses(model, "cpu"), losses(twin, "jax")
    for name in expected:
        torch.testing.assert_close(ours[name].cpu(), expected[name], msg=lambda m, name=name: f"{name}: {m}")
    for (name, one), other in zip(twin.named_parameters(), model.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad.cpu(), other.grad, msg=lambda m, name=name: f"{name}: {m}")


def test_backbones_and_heads_compile():
    for make in (retinanet, fcos, ssd):
        model = build(make)
        twin = copy.deepcopy(model).to("jax")
        batch = torch.stack([sample((3, 64, 64), torch.float64, seed=n) for n in range(2)])

        def raw(x, model=model):
            return model.head(list(model.backbone(x).values()))

        with torch.no_grad():
            ours, expected = torchax_core.jit(lambda x, twin=twin: raw(x, twin))(batch.to("jax")), raw(batch)
        for name in expected:
            torch.testing.assert_close(ours[name].cpu(), expected[name])


def test_a_segmentation_model_compiles():
    torch.manual_seed(0)
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    model, x = model.double().eval(), sample((1, 3, 64, 64), torch.float64)
    with torch.no_grad():
        expected = model(x)["out"]
        ours = torchax_core.jit(copy.deepcopy(model).to("jax"))(x.to("jax"))["out"]
    torch.testing.assert_close(ours.cpu(), expected)
