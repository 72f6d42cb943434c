"""Pretrain the tiny Qwen2.5-VL backbone from scratch on generated lessons.

    torchrun --nproc-per-node 2 train/pretrain_tiny.py --run-dir runs/pretrain_tiny --out checkpoints/tiny/backbone

Interrupt it and run the same command again: it continues, optimizer included. A finished backbone is taught further,
on new lessons and with a new optimizer, by naming it and another seed:

    torchrun --nproc-per-node 2 train/pretrain_tiny.py --init-from checkpoints/tiny/backbone --seed 1 --run-dir runs/2

See lmm4edit/training/pretraining.py.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lmm4edit.data.minibench.lessons import corpus
from lmm4edit.judge.backbones import load_backbone
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer, save_tiny
from lmm4edit.provenance import collect_provenance
from lmm4edit.training.pretraining import PretrainingRecipe, pretrain, prompt_corpus


def main() -> None:
    defaults = PretrainingRecipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/pretrain_tiny"))
    parser.add_argument("--out", type=Path, help="where to save the backbone when done (default: do not save)")
    parser.add_argument(
        "--init-from", type=Path, help="a saved tiny backbone to teach further (default: begin with random weights)"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--decay-fraction", type=float, default=defaults.decay_fraction)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vision-layers", type=int, default=3)
    parser.add_argument("--vision-hidden", type=int, default=96)
    parser.add_argument("--prompts", default="tiny")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        dist.init_process_group("gloo")
    recipe = PretrainingRecipe(
        seed=arguments.seed,
        processes=processes,
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        decay_fraction=arguments.decay_fraction,
    )
    prompts = load_prompts(arguments.prompts)
    if arguments.init_from:
        backbone, processor = load_backbone(arguments.init_from)
    else:
        texts = [*corpus(np.random.default_rng([recipe.seed, 5]), 3000), *prompt_corpus(prompts)]
        tokenizer = build_tiny_tokenizer(texts, vocab_size=1024)
        pixels = recipe.image_side**2
        processor = build_tiny_processor(tokenizer, patch_size=7, min_pixels=pixels, max_pixels=pixels)
        backbone = build_tiny_backbone(
            tokenizer,
            hidden=arguments.hidden,
            layers=arguments.layers,
            vision_hidden=arguments.vision_hidden,
            vision_layers=arguments.vision_layers,
            patch_size=7,
            image_size=recipe.image_side,
            initializer_range=0.08,
            seed=recipe.seed,
        )
    print(f"pretraining {sum(p.numel() for p in backbone.parameters()) / 1e6:.2f} M parameters")
    result = pretrain(backbone, processor, prompts, recipe, arguments.run_dir)
    if arguments.out and not (processes > 1 and dist.get_rank()):
        save_tiny(arguments.out, backbone, processor)
        metrics = (arguments.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
        (arguments.out / "pretraining_log.jsonl").write_text(metrics, encoding="utf-8")
        recipe_text = {
            "recipe": asdict(recipe),
            "init_from": str(arguments.init_from) if arguments.init_from else None,
            "held_out": result,
            "provenance": collect_provenance(),
        }
        (arguments.out / "recipe.json").write_text(json.dumps(recipe_text, indent=2) + "\n", encoding="utf-8")
        print(f"saved {arguments.out}")
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
