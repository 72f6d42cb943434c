"""The scorer table: every row builds lazily, says what it is, and wrong names are answered with the near one."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from lmm4edit.errors import ScorerError
from lmm4edit.records import EditSample, Prediction
from lmm4edit.scorers import base
from lmm4edit.scorers.base import Scorer, ScorerInfo, build_scorer, scorer_table


class Constant:
    """A scorer from outside: ten lines and an entry point."""

    info = ScorerInfo("constant", "test", frozenset({"edited"}), low=0, high=1)

    def score(self, samples: list[EditSample]) -> list[list[Prediction]]:
        return [[Prediction(s.sample_id, "constant", "score", 0.5)] for s in samples]


def test_every_pixel_row_builds_and_describes_itself() -> None:
    table = scorer_table()
    assert set(table) >= {"mse", "psnr", "ssim", "judge", "judge-text"}
    for name in ("mse", "psnr", "ssim"):
        scorer = build_scorer(name)
        assert isinstance(scorer, Scorer)
        info = scorer.info
        assert info.name == name and info.needs == {"source", "edited"} and info.targets == ("score",)
        assert info.low is not None and info.high is not None and info.low < info.high
        assert info.code_license and info.implementation and info.notes
        assert ScorerInfo.from_record(info.as_record()) == info
    assert build_scorer("mse").info.higher_is_better is False


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sim", "Unknown scorer 'sim'. Did you mean 'ssim'? Known: judge:PATH, judge-text:PATH, mse, psnr, ssim."),
        ("lpips", "Unknown scorer 'lpips'. Known: judge:PATH, judge-text:PATH, mse, psnr, ssim."),
        ("psnr:12", "Scorer 'psnr' takes no argument, got '12'. Write 'psnr' alone."),
        ("judge", "Scorer 'judge' needs a checkpoint folder: write judge:PATH."),
        ("judge:", "Scorer 'judge:': expected something after the colon (checkpoint folder)."),
    ],
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(ScorerError) as caught:
        build_scorer(spec)
    assert str(caught.value) == message


def test_a_package_adds_a_scorer_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("constant", f"{__name__}:Constant", base.ENTRY_POINT_GROUP)
    monkeypatch.setattr(base, "entry_points", lambda group: [point] if group == base.ENTRY_POINT_GROUP else [])
    assert "constant" in scorer_table()
    assert build_scorer("constant").info.name == "constant"
    taken = EntryPoint("ssim", "other:Ssim", base.ENTRY_POINT_GROUP)
    monkeypatch.setattr(base, "entry_points", lambda group: [taken])
    with pytest.raises(ScorerError) as caught:
        scorer_table()
    assert str(caught.value) == (
        "Scorer 'ssim' of entry point 'other:Ssim': this name is taken by 'lmm4edit.scorers.pixel:build_ssim'. Rename "
        "it in the package's 'lmm4edit.scorers' entry points."
    )


def test_a_row_that_cannot_be_loaded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("lost", "nowhere_at_all:build", base.ENTRY_POINT_GROUP),
        EntryPoint("odd", "builtins:dict", base.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(base, "entry_points", lambda group: points)
    with pytest.raises(ScorerError) as caught:
        build_scorer("lost")
    assert str(caught.value) == (
        "Scorer 'lost': cannot load 'nowhere_at_all:build': No module named 'nowhere_at_all'. Is everything it needs "
        "installed?"
    )
    with pytest.raises(ScorerError, match="Scorer 'odd': builtins:dict returned a dict without info and score"):
        build_scorer("odd")


def test_building_a_pixel_scorer_loads_no_torch() -> None:
    code = (
        "import sys; from lmm4edit.scorers.base import build_scorer; build_scorer('mse'); "
        "import lmm4edit.evaluation.metrics; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
