"""What is known of each backbone family and what is proven of it here. No torch: ``lmm4edit backbones`` reads this.

Every claim names a test, which runs for exactly the families that make the claim: the table cannot say more than the
tests do. How a family is driven stands in
:mod:`lmm4edit.judge.backbone_table`.
"""

from __future__ import annotations

from dataclasses import dataclass

_TESTS = "tests/judge/test_families.py"
_TRAINING = "tests/judge/test_families_training.py"


@dataclass(frozen=True)
class Proof:
    """What a test shows.

    Attributes:
        shows: in a sentence.
        file, test: where it stands and what it is called.
    """

    shows: str
    file: str
    test: str


PROOFS: dict[str, Proof] = {
    "class": Proof(
        "the tiny model is of the real Transformers class; adapter patterns match its linear layers and no others",
        _TESTS,
        "test_the_tiny_model_is_of_the_real_class",
    ),
    "tokens": Proof(
        "an image takes as many tokens as the family's own processor says, for six sizes",
        _TESTS,
        "test_images_take_the_tokens_that_the_processor_says",
    ),
    "packed": Proof(
        "all questions in one sequence give the states of one question alone (2e-5), with SDPA and eager attention",
        _TESTS,
        "test_packed_states_equal_one_question_alone",
    ),
    "gradients": Proof(
        "loss and gradients of both stages, packed and one question a row, are equal (2e-4 relative)",
        _TESTS,
        "test_packed_loss_and_gradients_equal_separate",
    ),
    "rows": Proof(
        "a batch gives the scores of its rows alone (1e-3 on the MOS scale)",
        _TESTS,
        "test_a_batch_equals_its_rows_alone",
    ),
    "prefix": Proof(
        "edits that continue a kept source prefix get the states of whole ones (2e-5), with SDPA and eager attention",
        _TESTS,
        "test_edits_that_continue_a_kept_prefix_equal_whole_ones",
    ),
    "features": Proof(
        "image features that were computed before give the states of the pixels (2e-5)",
        _TESTS,
        "test_features_from_outside_give_the_same_states",
    ),
    "adapters": Proof(
        "AdaLoRA on vision encoder and language model: every adapted matrix and the projector get gradients",
        _TESTS,
        "test_everything_that_is_trained_gets_a_gradient",
    ),
    "bfloat16": Proof(
        "a backbone in bfloat16 with trained parts in float32: loss of both stages within 5 %, finite gradients",
        _TESTS,
        "test_a_backbone_in_bfloat16_trains_in_float32",
    ),
    "training": Proof(
        "optimizer steps of stage 1, then of stage 2, in the training loop; load_judge reads it, it scores a pair",
        _TRAINING,
        "test_both_stages_train_and_the_judge_scores_a_pair",
    ),
    "reload": Proof(
        "a judge saved and loaded gives the same scores (1e-6)",
        _TESTS,
        "test_a_saved_judge_gives_the_same_scores",
    ),
    "refusal": Proof(
        "weights renamed, of another shape or of another family are refused by name",
        _TESTS,
        "test_a_wrong_or_incomplete_checkpoint_is_refused_by_name",
    ),
}
"""By the names that the families' claims use."""


_OF_MOST = tuple(claim for claim in PROOFS if claim != "features")


@dataclass(frozen=True)
class Family:
    """One backbone family.

    Attributes:
        model_type: as in ``config.json`` and :data:`lmm4edit.judge.backbone_table.BACKBONES`.
        name: for people.
        checkpoints: published weights of this class, by their names. None of them was ever loaded here.
        licence: of the published weights, as their model cards state it; read the card before use.
        packed: whether all questions on an edit go through in one sequence; else one question a row.
        adapters: what AdaLoRA and LoRA reach.
        images: what happens to an image, and what ``min_pixels`` and ``max_pixels`` do.
        tested_parameters: of the tiny random model that the proofs are made with.
        proven: keys of :data:`PROOFS`.
        caveats: what a user should know.
    """

    model_type: str
    name: str
    checkpoints: tuple[str, ...]
    licence: str
    packed: bool
    adapters: str
    images: str
    tested_parameters: int
    proven: tuple[str, ...] = _OF_MOST
    caveats: str = ""


NOT_PROVEN = (
    "Published weights were never loaded here (no network, no GPU): that names, shapes and tokenizers of the files "
    "fit is Transformers' promise, checked strictly when you load them. Proofs are on tiny random models on a "
    "processor; GPUs and several processes are tested with qwen2_5_vl alone. That a family judges well "
    "is not claimed."
)
"""What holds for every family."""

_ALL_LINEAR = "attention and MLP of vision encoder and language model; projector in full"

FAMILIES: tuple[Family, ...] = (
    Family(
        model_type="qwen2_5_vl",
        name="Qwen2.5-VL",
        checkpoints=tuple(f"Qwen/Qwen2.5-VL-{size}-Instruct" for size in ("3B", "7B", "32B", "72B")),
        licence="7B, 32B: Apache-2.0; 3B: Qwen Research (non-commercial); 72B: Qwen",
        packed=True,
        adapters=_ALL_LINEAR,
        images="any size, in proportion; min_pixels and max_pixels hold",
        tested_parameters=56_464,
        proven=tuple(PROOFS),
        caveats="The default. 3B ties its embeddings, 7B does not.",
    ),
    Family(
        model_type="qwen2_vl",
        name="Qwen2-VL",
        checkpoints=tuple(f"Qwen/Qwen2-VL-{size}-Instruct" for size in ("2B", "7B", "72B")),
        licence="2B, 7B: Apache-2.0; 72B: Qwen",
        packed=True,
        adapters=_ALL_LINEAR,
        images="any size, in proportion; min_pixels and max_pixels hold",
        tested_parameters=55_456,
        proven=tuple(PROOFS),
    ),
    Family(
        model_type="qwen3_vl",
        name="Qwen3-VL (dense)",
        checkpoints=tuple(f"Qwen/Qwen3-VL-{size}-Instruct" for size in ("2B", "4B", "8B", "32B")),
        licence="Apache-2.0",
        packed=True,
        adapters=_ALL_LINEAR,
        images="any size, in proportion; min_pixels and max_pixels hold",
        tested_parameters=81_328,
        caveats="The mergers of deeper vision layers (DeepStack) count as projector. The MoE sizes are another class.",
    ),
    Family(
        model_type="llava",
        name="LLaVA 1.5",
        checkpoints=("llava-hf/llava-1.5-7b-hf", "llava-hf/llava-1.5-13b-hf"),
        licence="Llama 2 Community",
        packed=True,
        adapters=_ALL_LINEAR + ". The vision layer behind the one that is read is left out",
        images="padded to a square and resized to one size (336 px); min_pixels and max_pixels are refused",
        tested_parameters=52_992,
        caveats="The processor alone would cut off the ends of an image, and edits there with them; we pad first. "
        "Trained on one image a prompt; here it sees two. Full fine-tuning in several processes is not tested: some "
        "vision weights are never read, which DDP refuses.",
    ),
    Family(
        model_type="llava_next",
        name="LLaVA-NeXT (1.6)",
        checkpoints=("llava-hf/llava-v1.6-vicuna-7b-hf", "llava-hf/llava-v1.6-vicuna-13b-hf"),
        licence="Llama 2 Community",
        packed=True,
        adapters=_ALL_LINEAR + ". The vision layer behind the one that is read is left out",
        images="a whole and crops of 336 px, up to 2,928 tokens an image; min_pixels and max_pixels are refused",
        tested_parameters=53_024,
        caveats="Two images exceed Vicuna's 4,096 tokens if both have four crops: a longer sequence is refused, never "
        "cut. The Mistral and Yi sizes load but were tuned with other chat markers. The row-end embedding is frozen.",
    ),
    Family(
        model_type="internvl",
        name="InternVL 2.5 and 3",
        checkpoints=tuple(f"OpenGVLab/InternVL3-{size}-hf" for size in ("1B", "2B", "8B", "14B", "38B", "78B")),
        licence="MIT or Qwen, as the card of the size says",
        packed=True,
        adapters=_ALL_LINEAR,
        images="tiles of 448 px and a thumbnail, up to 13 x 256 tokens an image; max_pixels limits the tiles",
        tested_parameters=52_512,
        caveats="Tested with a Qwen2 language model. InternVL 2.5 is published in its authors' own layout, which this "
        "class does not read: convert it to the native one first.",
    ),
    Family(
        model_type="deepseek_vl",
        name="DeepSeek-VL (1.3B)",
        checkpoints=("deepseek-community/deepseek-vl-1.3b-chat", "deepseek-community/deepseek-vl-1.3b-base"),
        licence="DeepSeek Model License",
        packed=True,
        adapters=_ALL_LINEAR,
        images="resized and padded to one square (384 px, 576 tokens); min_pixels and max_pixels are refused",
        tested_parameters=53_296,
        caveats="The 7B sizes have a second vision encoder (SAM) and are another class, deepseek_vl_hybrid.",
    ),
    Family(
        model_type="deepseek_vl_v2",
        name="DeepSeek-VL2 (Small)",
        checkpoints=("deepseek-ai/deepseek-vl2-small",),
        licence="DeepSeek Model License",
        packed=True,
        adapters=_ALL_LINEAR + ". Shared experts are adapted, routed experts and their router are not",
        images="the whole and up to 9 tiles of 384 px, up to 2,101 tokens an image; max_pixels limits the canvas",
        tested_parameters=52_928,
        proven=tuple(claim for claim in _OF_MOST if claim not in ("class", "tokens")),
        caveats="Transformers has no such class: ours is put together from its SigLIP and deepseek_v2 and reads the "
        "published configuration and weight names (tests/judge/test_deepseek_vl2.py). It was never compared with the "
        "authors' code, and its image tokens follow the paper and that code by reading alone. The Tiny and Base sizes "
        "have other language models and are refused.",
    ),
)
"""All families, the default first."""
