"""Vision architectures as timm and torchvision build them, at their own topology and a small size.

Both packages are for these tests alone (`pip install --no-deps timm torchvision pillow`, versions in constraints.txt). The
compiled half of torchvision does not load beside a CPU build of torch; only its detection ops live there, so their schemas are
declared before the first import and nothing else is missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from models import add, image
from torch import nn

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    *(
        f"{name}(Tensor input, Tensor rois, float scale, SymInt height, SymInt width{more}) -> {result}"
        for name, more, result in (
            ("roi_align", ", int sampling_ratio, bool aligned", "Tensor"),
            ("qroi_align", ", int sampling_ratio, bool aligned", "Tensor"),
            ("ps_roi_align", ", int sampling_ratio", "(Tensor, Tensor)"),
            ("roi_pool", "", "(Tensor, Tensor)"),
            ("ps_roi_pool", "", "(Tensor, Tensor)"),
        )
    ),
    *(
        f"_{name}_backward(Tensor grad, Tensor rois{mapping}, float scale, SymInt pooled_height, SymInt pooled_width"
        f"{more}, SymInt batch_size, SymInt channels, SymInt height, SymInt width{last}) -> Tensor"
        for name, mapping, more, last in (
            ("roi_align", "", "", ", int sampling_ratio, bool aligned"),
            ("ps_roi_align", ", Tensor mapping", ", int sampling_ratio", ""),
            ("roi_pool", ", Tensor argmax", "", ""),
            ("ps_roi_pool", ", Tensor mapping", "", ""),
        )
    ),
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) "
    "-> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def missing(package: str) -> str:
    """Why a model of this package cannot be built here; empty if it can."""
    absent = [name for name in dict.fromkeys((package, "torchvision", "PIL")) if find_spec(name) is None]
    return f"{', '.join(absent)} not installed: pip install --no-deps timm torchvision pillow" if absent else ""


@cache
def declared() -> torch.library.Library:
    """The ops that torchvision wants to find; kept, since they live as long as the library does."""
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    return library


@dataclass(frozen=True)
class FromLibrary:
    """A class or function of a library, by its path, called with these options."""

    path: str
    options: tuple[tuple[str, Any], ...]

    def __call__(self) -> nn.Module:
        declared()
        module, _, name = self.path.rpartition(".")
        kind: nn.Module = getattr(import_module(module), name)(**dict(self.options))
        return kind


def timm_model(name: str, model: str, size: int = 32, note: str = "", **options: Any) -> None:
    build = FromLibrary("timm.create_model", tuple({"model_name": model, "num_classes": 10, **options}.items()))
    add(name, "timm", build, image(size), skip=missing("timm"), note=note)


def torchvision_model(name: str, model: str, size: int = 64, **options: Any) -> None:
    build = FromLibrary(f"torchvision.models.{model}", tuple({"num_classes": 10, **options}.items()))
    add(name, "torchvision", build, image(size), skip=missing("torchvision"))


@dataclass(frozen=True)
class SmallVgg:
    """VGG-11 with batch norm, whose class fixes the width of its classifier at 4096: the same layers, narrow."""

    def __call__(self) -> nn.Module:
        declared()
        vgg = import_module("torchvision.models.vgg")
        widths = [8, "M", 12, "M", 16, 16, "M", 24, 24, "M", 24, 24, "M"]
        model: nn.Module = vgg.VGG(vgg.make_layers(widths, batch_norm=True), init_weights=False)
        narrow = (nn.Linear(24 * 49, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 32), nn.ReLU(True), nn.Dropout())
        model.classifier = nn.Sequential(*narrow, nn.Linear(32, 10))
        return model


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 6}
timm_model("timm_deit", "deit_tiny_patch16_224", **SMALL)
timm_model("timm_deit_distilled", "deit_tiny_distilled_patch16_224", **SMALL)
timm_model("timm_eva02", "eva02_tiny_patch14_224", **SMALL)
add(
    "timm_mixer",
    "timm",
    FromLibrary(
        "timm.models.MlpMixer",
        (("img_size", 32), ("patch_size", 8), ("num_blocks", 2), ("embed_dim", 24), ("num_classes", 10)),
    ),
    image(),
    skip=missing("timm"),
)
timm_model("timm_convnext", "convnext_atto", 64, depths=(1, 1, 2, 1), dims=(8, 12, 16, 20))
timm_model(
    "timm_convnextv2",
    "convnextv2_atto",
    64,
    depths=(1, 1, 2, 1),
    dims=(8, 12, 16, 20),
)
timm_model("timm_efficientnet", "efficientnet_b0", 64)
timm_model("timm_mobilenetv3", "mobilenetv3_small_050", 64)
timm_model("timm_resnet50", "resnet50", 64, channels=(16, 24, 32, 40), layers=(2, 2, 2, 2))
torchvision_model("tv_efficientnet_b0", "efficientnet_b0")
torchvision_model("tv_mobilenet_v3", "mobilenet_v3_small")
torchvision_model("tv_mnasnet", "mnasnet0_5")
torchvision_model("tv_regnet_x", "regnet_x_400mf")
torchvision_model("tv_regnet_y", "regnet_y_400mf")
torchvision_model("tv_densenet", "DenseNet", growth_rate=8, block_config=(3, 4, 5, 3), num_init_features=16)
torchvision_model("tv_inception_v3", "inception_v3", 80, aux_logits=False, init_weights=False)
torchvision_model("tv_googlenet", "googlenet", aux_logits=False, init_weights=False)
torchvision_model("tv_shufflenet_v2", "shufflenet_v2_x0_5")
torchvision_model("tv_squeezenet", "squeezenet1_1")
torchvision_model("tv_resnext50", "resnext50_32x4d")
torchvision_model("tv_resnet50", "resnet50")
add("tv_vgg11_bn", "torchvision", SmallVgg(), image(), skip=missing("torchvision"))
