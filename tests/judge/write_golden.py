"""Write the golden list of trainable parameters: ``python -m tests.judge.write_golden``. Read its difference by eye."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from lmm4edit.judge.adapters import trainable_parameters
from lmm4edit.judge.backbones import load_backbone
from lmm4edit.judge.prompts import load_prompts
from tests.judge.kit import Kit, save_kit_backbone

if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        save_kit_backbone(Path(folder))
        model, processor = load_backbone(folder)
        judge = Kit(model, processor, load_prompts()).judge()
    golden = Path(__file__).parent / "golden" / "trainable_parameters.txt"
    golden.parent.mkdir(exist_ok=True)
    golden.write_text("".join(f"{n} {s}\n" for n, s in trainable_parameters(judge).items()), encoding="utf-8")
