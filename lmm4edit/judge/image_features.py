"""Image features: what the vision encoder and the projector make of an image, kept for its next appearance.

Images are known by their pixels, never by their path. Families whose language model takes features from outside are
marked in the table of backbones (``outside_features``).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmm4edit.judge.backbone_table import backbone_spec
from lmm4edit.judge.backbones import plain_model
from lmm4edit.judge.image_inputs import ProcessedImage


def image_digest(image: ProcessedImage) -> str:
    """Digest of what the vision encoder reads of an image: equal pixels have equal ones, whatever their path."""
    patches = image.patches.contiguous()
    digest = hashlib.blake2b(repr((image.grid, image.tokens, image.size, patches.dtype)).encode(), digest_size=20)
    digest.update(patches.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def takes_features(backbone: nn.Module) -> bool:
    """Whether features can be computed apart and handed to the language model."""
    model = plain_model(backbone)
    if not backbone_spec(model).outside_features:
        return False
    return "mm_encoder_outputs" in inspect.signature(model.model.forward).parameters  # since Transformers 5.24


def encode_images(backbone: nn.Module, images: Sequence[ProcessedImage]) -> list[Tensor]:
    """Features [tokens, hidden size] of each image, all of them in one pass of the vision encoder."""
    model: Any = plain_model(backbone)
    device = model.device
    out = model.model.get_image_features(
        torch.cat([image.patches for image in images]).to(device),
        torch.tensor([image.grid for image in images], device=device),
        return_dict=True,
    )
    return list(out.pooler_output)
