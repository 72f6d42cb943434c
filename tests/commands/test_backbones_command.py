"""``lmm4edit backbones`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from lmm4edit.cli import app
from lmm4edit.judge.families import FAMILIES, NOT_PROVEN, PROOFS

WIDE = {"COLUMNS": "160", "NO_COLOR": "1"}


def test_every_family_is_listed_with_what_is_proven() -> None:
    result = CliRunner().invoke(app, ["backbones"], env=WIDE)
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    for family in FAMILIES:
        assert f"{family.model_type}: {family.name}" in words and f"{family.tested_parameters:,} parameters" in words
        assert all(name in words for name in family.checkpoints)
        assert family.licence in words
    assert words.count("all questions on an edit in one sequence") == sum(family.packed for family in FAMILIES)
    assert all(proof.test in words for proof in PROOFS.values())
    assert words.endswith(NOT_PROVEN)


def test_json_says_the_same_without_torch() -> None:
    code = (
        "import sys\n"
        "from lmm4edit.cli import app\n"
        "try: app(['backbones', '--json'])\n"
        "except SystemExit: pass\n"
        "names = ('torch', 'transformers', 'numpy', 'peft')\n"
        "print([name for name in names if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    content = json.loads(done.stdout)
    assert [family["model_type"] for family in content["families"]] == [family.model_type for family in FAMILIES]
    assert content["proofs"]["packed"]["test"] == PROOFS["packed"].test and content["not_proven"] == NOT_PROVEN


def test_every_test_that_is_named_exists() -> None:
    root = Path(__file__).parents[2]
    for proof in PROOFS.values():
        assert f"\ndef {proof.test}(" in (root / proof.file).read_text(encoding="utf-8")
