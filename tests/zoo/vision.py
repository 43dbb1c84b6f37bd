"""Vision: classifiers of the package `transformers`."""

from __future__ import annotations

from typing import Any

from .entry import CLASSES, Entry, both, classes, features, nothing
from .pretrained import FromPixels, plain, wrapped

SIDE = 32
PIXELS = features(3, SIDE, SIDE, name="pixel_values")
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": SIDE, "patch_size": 8}


def _classifier(name: str, model: str, kind: str, *, side: int = SIDE, **sizes: Any) -> Entry:
    make = wrapped(FromPixels, model, kind, **({"num_labels": CLASSES} | sizes))
    return Entry(name, "vision", make, features(3, side, side, name="pixel_values"), classes())


def _own_loss(name: str, model: str, kind: str, **sizes: Any) -> Entry:
    """As `transformers` gives it: labels in, loss out."""
    make = plain(model, kind, **({"num_labels": CLASSES} | sizes))
    return Entry(name, "vision", make, both(PIXELS, classes()), nothing, loss=None)


CLASSIFIERS = [
    _own_loss("vit", "ViTForImageClassification", "ViTConfig", **VIT),
    _classifier("deit", "DeiTForImageClassification", "DeiTConfig", **VIT),
    _classifier("beit", "BeitForImageClassification", "BeitConfig", use_relative_position_bias=True, **VIT),
    _classifier("dinov2", "Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2, **VIT),
    _classifier(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        image_size=SIDE,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _classifier(
        "swinv2",
        "Swinv2ForImageClassification",
        "Swinv2Config",
        image_size=SIDE,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _classifier("convnext", "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _own_loss("convnextv2", "ConvNextV2ForImageClassification", "ConvNextV2Config", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _own_loss(
        "resnet", "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    ),
    _classifier(
        "resnet_bottleneck", "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1]
    ),
    _classifier(
        "regnet", "RegNetForImageClassification", "RegNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4
    ),
    _classifier("bit", "BitForImageClassification", "BitConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_groups=4),
    _classifier(
        "mobilenet_v1", "MobileNetV1ForImageClassification", "MobileNetV1Config", image_size=SIDE, depth_multiplier=0.25, min_depth=4
    ),
    _classifier(
        "mobilenet_v2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        image_size=SIDE,
        depth_multiplier=0.25,
        depth_divisible_by=4,
        min_depth=4,
    ),
    _classifier(
        "mobilevit",
        "MobileViTForImageClassification",
        "MobileViTConfig",
        image_size=SIDE,
        hidden_sizes=[16, 20, 24],
        neck_hidden_sizes=[4, 8, 8, 12, 12, 16, 32],
        num_attention_heads=4,
    ),
    _classifier(
        "mobilevitv2",
        "MobileViTV2ForImageClassification",
        "MobileViTV2Config",
        side=64,
        image_size=64,
        width_multiplier=0.25,
        base_attn_unit_dims=[32, 48, 64],
        n_attn_blocks=[1, 1, 1],
    ),
    _classifier(
        "efficientnet",
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        image_size=SIDE,
        width_coefficient=0.25,
        depth_coefficient=0.5,
        hidden_dim=320,
        depth_divisor=4,
    ),
    _classifier(
        "poolformer",
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    _classifier(
        "cvt",
        "CvtForImageClassification",
        "CvtConfig",
        embed_dim=[8, 16, 24],
        num_heads=[1, 2, 3],
        depth=[1, 2, 3],
        mlp_ratio=[2.0, 2.0, 2.0],
        attention_drop_rate=[0.0] * 3,
        drop_rate=[0.0] * 3,
        drop_path_rate=[0.0] * 3,
    ),
    _classifier(
        "levit",
        "LevitForImageClassification",
        "LevitConfig",
        side=64,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        mlp_ratio=[2, 2, 2],
    ),
    _classifier(
        "pvt",
        "PvtForImageClassification",
        "PvtConfig",
        image_size=SIDE,
        num_encoder_blocks=2,
        depths=[1, 1],
        sequence_reduction_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    _classifier(
        "pvt_v2",
        "PvtV2ForImageClassification",
        "PvtV2Config",
        image_size=SIDE,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    _classifier(
        "focalnet",
        "FocalNetForImageClassification",
        "FocalNetConfig",
        image_size=SIDE,
        embed_dim=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    _classifier(
        "hiera",
        "HieraForImageClassification",
        "HieraConfig",
        image_size=[SIDE, SIDE],
        embed_dim=16,
        depths=[1, 1],
        num_heads=[1, 2],
        num_query_pool=1,
        query_stride=[2, 2],
        masked_unit_size=[4, 4],
        masked_unit_attention=[True, False],
    ),
    _classifier(
        "swiftformer",
        "SwiftFormerForImageClassification",
        "SwiftFormerConfig",
        image_size=SIDE,
        depths=[1, 1, 1, 1],
        embed_dims=[8, 12, 16, 24],
        mlp_ratio=2,
    ),
    _classifier("ijepa", "IJepaForImageClassification", "IJepaConfig", **VIT),
]

ENTRIES = CLASSIFIERS
