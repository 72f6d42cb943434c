"""The published shapes of Qwen2.5-VL have the published numbers of parameters (on ``meta``: no memory, no files)."""

from __future__ import annotations

import pytest
import torch

from lmm4edit.judge.adapters import AdapterConfig, adalora_layers, attach_adapters
from lmm4edit.judge.published import SHAPES, published_config, published_size

COUNTS = {"3B": 3_754_622_976, "7B": 8_292_166_656, "32B": 33_452_718_336, "72B": 73_410_777_344}
"""Parameters of Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct as the Hub counts them in the weight files: 3.75, 8.29, 33.5
and 73.4 billion. Tied embeddings count once."""


@pytest.mark.parametrize("size", list(SHAPES))
def test_shapes_add_up_to_the_published_counts(size: str) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = published_config(size)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[size]
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == SHAPES[size].tied
        layers = adalora_layers(attach_adapters(model, AdapterConfig()))
    assert len(layers) == 5 * config.vision_config.depth + 7 * SHAPES[size].layers
    assert published_size(f"Qwen/Qwen2.5-VL-{size}-Instruct") == size
