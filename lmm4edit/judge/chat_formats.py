"""Chat markers of the backbones that do not speak ChatML as Qwen-VL does (:data:`~lmm4edit.judge.prompts.CHATML`).

Each follows the chat template that the family's published processor carries.
"""

from __future__ import annotations

from lmm4edit.judge.prompts import ChatFormat

VICUNA = ChatFormat(
    system_start="",
    user_start=" USER:",
    assistant_start=" ASSISTANT:",
    turn_end="",
    end_of_answer="</s>",
    image_start="",
    image_token="<image>",
    image_end="\n",
    beginning="<s>",
    gap=" ",
)
"""Vicuna 1.5's format, which LLaVA 1.5 and the Vicuna sizes of LLaVA-NeXT were tuned with."""

INTERNVL_CHATML = ChatFormat(
    system_start="<|im_start|>system\n",
    user_start="<|im_start|>user\n",
    assistant_start="<|im_start|>assistant\n",
    turn_end="<|im_end|>\n",
    end_of_answer="<|im_end|>",
    image_start="<img>",
    image_token="<IMG_CONTEXT>",
    image_end="</img>\n",
)
"""ChatML with InternVL's image markers."""

DEEPSEEK = ChatFormat(
    system_start="",
    user_start="User:",
    assistant_start="Assistant:",
    turn_end="\n\n",
    end_of_answer="<｜end▁of▁sentence｜>",
    image_start="",
    image_token="<image_placeholder>",
    image_end="",
    beginning="<｜begin▁of▁sentence｜>",
    gap=" ",
)
"""DeepSeek-VL's format."""

DEEPSEEK_VL2 = ChatFormat(
    system_start="",
    user_start="<|User|>:",
    assistant_start="<|Assistant|>:",
    turn_end="\n\n",
    end_of_answer="<｜end▁of▁sentence｜>",
    image_start="",
    image_token="<image>",
    image_end="\n",
    beginning="<｜begin▁of▁sentence｜>",
    gap=" ",
)
"""DeepSeek-VL2's format."""
