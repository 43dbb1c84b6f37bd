"""Segmentation, depth, super resolution and detection of the package `transformers`, and its models of images with text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .entry import CLASSES, VOCABULARY, Batch, Entry, both, classes, features, nothing, tokens, values
from .pretrained import FromPixels, build, config, wrapped
from .vision import PIXELS, SIDE, VIT

_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _per_pixel(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A segmentation loss: logits are enlarged to the labels' size."""
    return F.cross_entropy(F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False), labels)


class Detector(nn.Module):
    """Class logits and boxes of a detector."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.model(pixel_values=pixel_values)
        return found.logits, found.pred_boxes


def detection_loss(outputs: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Queries matched with objects in order: classes and distances of boxes."""
    logits, found = outputs
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 5 * F.l1_loss(found, boxes)


def _objects(queries: int) -> Any:
    return lambda size, length: {
        "labels": torch.randint(0, CLASSES, (size, queries)),
        "boxes": torch.rand(size, queries, 4),
    }


def _detr() -> nn.Module:
    backbone = config("ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 4, "num_labels": CLASSES}
    return Detector(
        build("DetrForObjectDetection", "DetrConfig", use_timm_backbone=False, backbone_config=backbone, backbone=None, **sizes)
    )


def _yolos() -> nn.Module:
    sizes = {**VIT, "image_size": [SIDE, SIDE]}
    return Detector(build("YolosForObjectDetection", "YolosConfig", num_detection_tokens=4, num_labels=CLASSES, **sizes))


DENSE = [
    Entry(
        "segformer",
        "vision",
        wrapped(
            FromPixels,
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            num_labels=CLASSES,
        ),
        PIXELS,
        classes(CLASSES, "labels", SIDE, SIDE),
        loss=_per_pixel,
    ),
    Entry(
        "mobilevit_segmentation",
        "vision",
        wrapped(
            FromPixels,
            "MobileViTForSemanticSegmentation",
            "MobileViTConfig",
            image_size=64,
            hidden_sizes=[16, 20, 24],
            neck_hidden_sizes=[4, 8, 8, 12, 12, 16, 32],
            aspp_out_channels=16,
            atrous_rates=[2, 3, 4],
            num_labels=CLASSES,
        ),
        features(3, 64, 64, name="pixel_values"),
        classes(CLASSES, "labels", 16, 16),
        loss=_per_pixel,
    ),
    Entry(
        "glpn",
        "vision",
        wrapped(
            FromPixels,
            "GLPNForDepthEstimation",
            "GLPNConfig",
            output="predicted_depth",
            depths=[1, 1, 1, 1],
            sr_ratios=[4, 2, 1, 1],
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            mlp_ratios=[2, 2, 2, 2],
            decoder_hidden_size=8,
        ),
        PIXELS,
        values(SIDE, SIDE),
        loss="l1",
    ),
    Entry(
        "depth_anything_dpt",
        "vision",
        wrapped(
            FromPixels,
            "DPTForDepthEstimation",
            "DPTConfig",
            output="predicted_depth",
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=8,
            **(VIT | {"num_hidden_layers": 4}),
        ),
        PIXELS,
        values(64, 64),
        loss=nn.HuberLoss(),
    ),
    Entry(
        "swin2sr",
        "vision",
        wrapped(
            FromPixels,
            "Swin2SRForImageSuperResolution",
            "Swin2SRConfig",
            output="reconstruction",
            image_size=SIDE,
            patch_size=1,
            embed_dim=8,
            depths=[2],
            num_heads=[2],
            window_size=8,
            upscale=2,
        ),
        features(3, 16, 16, name="pixel_values"),
        values(3, 32, 32),
        loss="l1",
    ),
    Entry("detr", "vision", _detr, PIXELS, _objects(4), loss=detection_loss),
    Entry("yolos", "vision", _yolos, PIXELS, _objects(4), loss=detection_loss),
]


class ImageText(nn.Module):
    """A contrastive model that returns its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        found = self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)
        return found.loss


def _image_text(name: str, model: str, kind: str, text: str, vision: str) -> Entry:
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

    def make() -> nn.Module:
        parts = {
            "text_config": config(text, **words, **_SMALL).to_dict(),
            "vision_config": config(vision, image_size=SIDE, patch_size=8, **_SMALL).to_dict(),
        }
        return ImageText(build(model, kind, projection_dim=16, **parts))

    return Entry(name, "vision", make, both(tokens(), PIXELS), nothing, loss=None, lengths=(8, 11), sequence={"input_ids": (1,)})


class ImageQuestions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = VIT | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_labels": CLASSES}
        self.model = build(
            "BlipTextModel",
            "BlipTextConfig",
            vocab_size=VOCABULARY,
            max_position_embeddings=16,
            is_decoder=True,
            encoder_hidden_size=32,
            bos_token_id=1,
            eos_token_id=2,
            sep_token_id=3,
            use_cache=False,
            **_SMALL,
        )
        self.vision = build("ViTModel", "ViTConfig", **{name: value for name, value in sizes.items() if name in VIT})
        self.head = nn.Linear(32, CLASSES)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        seen = self.vision(pixel_values=pixel_values).last_hidden_state
        read = self.model(input_ids=input_ids, encoder_hidden_states=seen, is_decoder=True).last_hidden_state
        return self.head(read[:, 0])


def _vqa(size: int, length: int) -> Batch:
    return classes()(size, length)


MIXED = [
    _image_text("clip", "CLIPModel", "CLIPConfig", "CLIPTextConfig", "CLIPVisionConfig"),
    _image_text("siglip", "SiglipModel", "SiglipConfig", "SiglipTextConfig", "SiglipVisionConfig"),
    Entry("blip_question_answering", "vision", ImageQuestions, both(tokens(), PIXELS), _vqa, lengths=(8, 11), sequence={"input_ids": (1,)}),
]

ENTRIES = [*DENSE, *MIXED]
