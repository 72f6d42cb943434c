"""The report from stored files alone: complete, self-contained, escaped, honest about simulated ratings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import fake_run as fake
import numpy as np
import pytest
from PIL import Image

from lmm4edit.data.manifest import write_manifest
from lmm4edit.errors import StoreError
from lmm4edit.evaluation.cases import pick_cases
from lmm4edit.evaluation.columns import predicted_columns
from lmm4edit.evaluation.report import build_report
from lmm4edit.evaluation.runner import Run, read_run_folder, write_run
from lmm4edit.evaluation.stored import current_metrics
from lmm4edit.evaluation.training_curves import read_curves
from lmm4edit.predictions.store import PredictionStore
from lmm4edit.records import EditSample, Prediction
from lmm4edit.scorers.base import ScorerInfo


def make_run(
    folder: Path,
    edits: list[EditSample],
    rows: list[Prediction],
    scorers: dict[str, ScorerInfo],
    simulated: str | None = None,
) -> Path:
    run = folder / "run"
    run.mkdir(parents=True)
    with PredictionStore(run / "predictions.jsonl", {}) as store:
        store.append(rows)
    write_manifest(run / "manifest.jsonl", edits, relative_to=run)
    train = folder / "stage2"
    train.mkdir()
    lines = [{"kind": "train", "step": s, "loss": 2.0 / s} for s in range(1, 40)]
    lines += [{"kind": "validation", "step": s, "srcc_quality": s / 50, "accuracy": 0.6} for s in (10, 20, 30)]
    (train / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "tr')
    write_run(run, Run("toy <set>", scorers, simulated, (str(train),), {"time": "now"}))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    edits = fake.samples(folder, sources_per_task=2)
    return make_run(folder, edits, fake.predictions(edits), fake.SCORERS, "labelled")


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    return build_report(run).html.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Collects what a page would load, its ids, its text, and whether tags are balanced."""

    VOID = {"meta", "img", "br", "use", "path", "rect", "circle", "image", "line", "polyline", "link"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.images: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [str(found[k]) for k in ("src", "href", "xlink:href", "data") if found.get(k)]
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "img":
            self.images.append(str(found["src"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing_from_outside(html: str) -> None:
    page = Page(html)
    assert page.open == []
    assert page.loads
    assert [link for link in page.loads if not link.startswith(("#", "data:"))] == []
    assert not re.search(r"url\((?!\s*['\"]?(#|data:))", html)
    assert "@import" not in html and "<script" not in html and "<link" not in html
    assert len(page.ids) == len(set(page.ids))
    assert all(link[1:] in page.ids for link in page.loads if link.startswith("#"))


def test_text_from_data_is_escaped(html: str, run: Path) -> None:
    assert "toy &lt;set&gt;" in html and "toy <set>" not in html
    assert "&lt;b&gt;red&lt;/b&gt; heart" in html and "<b>red</b>" not in html


def test_every_part_is_there(html: str, run: Path) -> None:
    for anchor in ("agreement", "answers", "splits", "scatter", "tasks", "models", "comparison", "training", "cases"):
        assert f'<section id="{anchor}">' in html
    assert "cannot identify the image" in html
    images = Page(html).images
    assert len(images) % 2 == 0 and len(images) >= 8
    assert all(image.startswith("data:image/jpeg;base64,") for image in images)
    assert html.count('role="img"') >= 7
    report = run / "report"
    assert Image.open(report / "overview.png").size == (1600, 900)
    for name in ("agreement", "by_content", "scatter_00", "per_edit_task", "editing_models", "training_1"):
        assert (report / "figures" / f"{name}.svg").stat().st_size > 1000
        assert Image.open(report / "figures" / f"{name}.png").width > 800
    tables = {path.stem for path in (report / "tables").glob("*.csv")}
    assert tables >= {
        "agreement",
        "answers",
        "by_content",
        "comparisons",
        "editing_models",
        "further_statistics",
        "missing",
    }
    markdown = (report / "report.md").read_text(encoding="utf-8")
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", markdown):
        assert (report / picture).exists(), picture
    assert "| judge |" in markdown


def test_simulated_ratings_are_announced(run: Path, html: str) -> None:
    assert "Simulated ratings" in html and "no person rated these edits" in html
    assert "Simulated ratings" in (run / "report" / "report.md").read_text(encoding="utf-8")


def test_the_report_needs_no_model_and_gives_the_same_pictures_again(run: Path, html: str) -> None:
    figures = run / "report" / "figures"
    before = {path.name: path.read_bytes() for path in figures.iterdir()}
    assert len(before) >= 14
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'peft') or name.startswith('lmm4edit.judge'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from lmm4edit.evaluation.report import build_report\n"
        f"build_report({str(run)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in figures.iterdir()} == before


def test_statistics_are_computed_again_only_when_something_changed(tmp_path: Path) -> None:
    edits = fake.samples(sources_per_task=1)
    run = make_run(tmp_path, edits, fake.predictions(edits), fake.SCORERS)
    quick = {"resamples": 0, "group_by": []}
    first = current_metrics(run, read_run_folder(run), **quick)
    stamp = (run / "metrics.json").stat().st_mtime_ns
    assert current_metrics(run, read_run_folder(run), **quick).rows == first.rows
    assert current_metrics(run, read_run_folder(run)).provenance["resamples"] == 0
    assert (run / "metrics.json").stat().st_mtime_ns == stamp
    assert current_metrics(run, read_run_folder(run), resamples=20, group_by=[]).provenance["resamples"] == 20
    corrected = [replace(e, mos={d: 100 - v for d, v in e.mos.items()}) for e in read_run_folder(run).samples]
    write_manifest(run / "manifest.jsonl", corrected, relative_to=run)
    second = current_metrics(run, read_run_folder(run), **quick)
    old, new = (m.find(fake.JUDGE, "quality", "srcc").value for m in (first, second))
    assert new == pytest.approx(-old)


def plain_edits(count: int) -> list[EditSample]:
    made = []
    for i in range(count):
        mos = {"quality": float(i % 7)}
        made.append(EditSample(f"e{i}", f"e{i}", f"gone{i}.png", "gone.png", "$do$ it", mos=mos, editing_model="$m"))
    return made


def test_one_metric_without_labels_or_images_still_gives_a_report(tmp_path: Path) -> None:
    edits = plain_edits(12)
    rows = [Prediction(e.sample_id, "psnr", "score", 30.0 + i % 5) for i, e in enumerate(edits)]
    paths = build_report(make_run(tmp_path, edits, rows, {"psnr": fake.SCORERS["psnr"]}))
    text = paths.html.read_text(encoding="utf-8")
    assert Page(text).open == []
    assert '<section id="agreement">' in text and '<section id="cases">' not in text
    assert paths.overview.exists()
    assert "imulated" not in text


def test_constant_predictions_and_names_with_markup(tmp_path: Path) -> None:
    edits = plain_edits(12)
    names = [f"<i>${k}</i>" for k in range(4)]
    rows = [
        Prediction(e.sample_id, n, "score", float(i * k % 5)) for i, e in enumerate(edits) for k, n in enumerate(names)
    ]
    info = fake.SCORERS["psnr"]
    paths = build_report(make_run(tmp_path, edits, rows, {n: replace(info, name=n) for n in names}))
    text = paths.html.read_text(encoding="utf-8")
    assert "<i>$" not in text and "&lt;i&gt;$0&lt;/i&gt;" in text
    assert Page(text).open == []
    assert 'title="all 12 predictions equal 0">–</span>' in text
    assert not re.search(r"[^a-z]nan[^a-z]", text.lower())


def test_cases_differ_in_source_are_ordered_and_never_shown_twice() -> None:
    edits = fake.samples(sources_per_task=3)
    columns = predicted_columns(edits, fake.predictions(edits), fake.SCORERS)
    closest, farthest = pick_cases(edits, columns, fake.JUDGE, count=4)
    assert [len(closest.cases), len(farthest.cases)] == [4, 4]
    errors = [case.error for case in closest.cases]
    assert errors == sorted(errors)
    assert [c.error for c in farthest.cases] == sorted((c.error for c in farthest.cases), reverse=True)
    for group in (closest, farthest):
        assert len({c.sample.source_id for c in group.cases}) == 4
        assert len({c.sample.edit_task for c in group.cases}) == 4
    ids = [c.sample.sample_id for group in (closest, farthest) for c in group.cases]
    assert len(set(ids)) == 8
    case = closest.cases[0]
    assert case.error == pytest.approx(np.mean([abs(s.predicted - s.rated) for s in case.scores]))
    assert case.source is None
    assert case.image_failure is not None and case.sample.source_image in case.image_failure
    assert pick_cases(edits, columns, "psnr") == []


def test_training_curves_survive_a_torn_line_and_missing_folders(tmp_path: Path, run: Path) -> None:
    curves = read_curves(run.parent / "stage2")
    assert curves is not None
    assert len(curves.training["loss"][0]) == 39
    assert curves.validation == {"srcc_quality": ([10, 20, 30], [0.2, 0.4, 0.6]), "accuracy": ([10, 20, 30], [0.6] * 3)}
    assert read_curves(tmp_path) is None


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected the description of an evaluation run"):
        build_report(tmp_path)
