"""Splits by source: disjoint, stratified, the same everywhere; photographs that recur; the command's files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from lmm4edit.data.check import check_manifest
from lmm4edit.data.manifest import read_manifest, write_manifest
from lmm4edit.data.photographs import find_recurring_photographs, groups_of
from lmm4edit.data.split_manifest import split_manifest
from lmm4edit.data.splits import find_leaks, split_sources
from lmm4edit.errors import ManifestError
from lmm4edit.records import EditSample


def sample(source: str, number: int, task: str | None = None, image: str = "a.png") -> EditSample:
    return EditSample(f"{source}-{number}", source, image, f"{source}-{number}.png", "Do it", edit_task=task)


def test_the_papers_split() -> None:
    tasks = {f"{task}-{n}": task for task in map(str, range(13)) for n in range(40)}
    tasks |= {f"{task}-{n}": task for task in map(str, range(13, 21)) for n in range(70)}
    place = split_sources(tasks, {"test": 0.2})
    held_out = [tasks[source] for source, split in place.items() if split == "test"]
    assert [held_out.count(str(task)) for task in range(21)] == [8] * 13 + [14] * 8
    assert list(place) == list(tasks)


@given(
    tasks=st.dictionaries(st.text(max_size=4), st.sampled_from("abc"), min_size=12, max_size=60),
    shares=st.tuples(st.floats(0.1, 0.45), st.floats(0.1, 0.45)),
    seed=st.integers(0, 99),
)
def test_shares_and_independence_of_order(tasks: dict[str, str], shares: tuple[float, float], seed: int) -> None:
    fractions = dict(zip(("validation", "test"), shares, strict=True))
    place = split_sources(tasks, fractions, seed=seed)
    assert place.keys() == tasks.keys()
    assert split_sources(dict(reversed(tasks.items())), fractions, seed=seed) == place
    for name, share in fractions.items():
        held = [tasks[source] for source, split in place.items() if split == name]
        assert abs(len(held) - share * len(tasks)) <= 1.001
        for task in set(tasks.values()):
            assert abs(held.count(task) - share * list(tasks.values()).count(task)) <= 1.001


def test_a_split_that_never_changes() -> None:
    place = split_sources({f"s{n}": "add" for n in range(10)}, {"test": 0.3})
    assert [source for source, split in place.items() if split == "test"] == ["s1", "s4", "s6"]
    assert place != split_sources({f"s{n}": "add" for n in range(10)}, {"test": 0.3}, seed=1)


def test_a_source_that_no_utf_8_can_hold() -> None:
    assert len(split_sources({f"s{n}\ud800": "add" for n in range(5)}, {"test": 0.2})) == 5


def test_clusters_stay_together_whatever_their_tasks() -> None:
    tasks = {f"s{n}": f"task{n % 3}" for n in range(30)}
    clusters = {f"s{n}": "s0" for n in range(0, 6)}
    for seed in range(20):
        place = split_sources(tasks, {"test": 0.2}, seed=seed, clusters=clusters)
        assert len({place[source] for source in clusters}) == 1


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({"test": 1.0}, "test: expected a share above 0 and below 1, got 1. Give 0.2 for a fifth."),
        ({"test": float("nan")}, "test: expected a share above 0 and below 1, got nan. Give 0.2 for a fifth."),
        (
            {"validation": 0.5, "test": 0.5},
            "Expected shares that together leave something for 'train', got 0.5 + 0.5. Lower them.",
        ),
        (
            {"test": 0.01},
            "Expected at least one source in every split, got none in test: 3 sources that can be told apart are too "
            "few for these shares. Raise the share, or give more sources.",
        ),
    ],
)
def test_shares_that_do_not_work_out(fractions: dict[str, float], message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        split_sources({"a": "x", "b": "x", "c": "y"}, fractions)
    assert str(caught.value) == message


def test_leaks() -> None:
    splits = {"train": [sample("a", 0), sample("b", 0)], "test": [sample("a", 1), sample("c", 0)]}
    leaks = find_leaks(splits, [("b", "c"), ("x", "b")])
    assert [(leak.kind, leak.sources, leak.splits) for leak in leaks] == [
        ("source", ("a",), ("test", "train")),
        ("photograph", ("b", "c"), ("test", "train")),
    ]
    assert groups_of([("a", "b"), ("c", "b"), ("x", "y")]) == [("a", "b", "c"), ("x", "y")]


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)
    return Image.fromarray(pixels).resize((200, 150), Image.Resampling.BICUBIC)


def test_photographs_that_recur(tmp_path: Path) -> None:
    first = picture(1)
    first.save(tmp_path / "first.png")
    first.resize((120, 100)).save(tmp_path / "smaller.jpg", quality=50)
    ImageEnhance.Brightness(first).enhance(0.7).save(tmp_path / "darker.png")
    picture(2).save(tmp_path / "other.png")
    Image.new("RGB", (50, 50), "red").save(tmp_path / "flat.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    names = ("first.png", "other.png", "smaller.jpg", "darker.png", "flat.png", "broken.png", "absent.png")
    report = find_recurring_photographs({name: str(tmp_path / name) for name in names})
    assert report.groups == (("darker.png", "first.png", "smaller.jpg"),)
    assert all(0.99 <= value <= 1 for value in report.correlations.values())
    assert report.n_compared == 4
    assert set(report.not_compared) == {"flat.png", "broken.png", "absent.png"}
    assert report.not_compared["flat.png"] == "an image without contrast"
    assert set(report.cluster_of().values()) == {"darker.png"}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    samples = []
    for number in range(12):
        # The last two sources show the photographs of the first two.
        picture(number % 10).save(tmp_path / f"s{number}.png")
        for edit in range(2):
            picture(100 + number * 2 + edit).save(tmp_path / f"s{number}-{edit}.png")
            task = ("add", "remove")[number % 2]
            paths = (str(tmp_path / f"s{number}.png"), str(tmp_path / f"s{number}-{edit}.png"))
            mos = {"realism": 5.0 + number}
            samples.append(EditSample(f"s{number}-{edit}", f"s{number}", *paths, "Do", edit_task=task, mos=mos))
    write_manifest(tmp_path / "all.jsonl", samples, relative_to=tmp_path)
    (tmp_path / "dimensions.yaml").write_text("dimensions:\n- {name: realism, question: Rate the realism.}\n")
    return tmp_path / "all.jsonl"


def test_a_manifest_is_split(manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    done = split_manifest(manifest, out, {"validation": 0.2, "test": 0.2})
    splits = {name: read_manifest(out / f"{name}.jsonl") for name in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == 24
    assert find_leaks(splits, [("s0", "s10"), ("s1", "s11")]) == []
    assert done.summary["recurring_photographs"] == [["s0", "s10"], ["s1", "s11"]]
    assert all({s.groups["split"] for s in rows} == {name} for name, rows in splits.items())
    assert all(check_manifest(out / f"{name}.jsonl") == [] for name in splits)
    assert json.loads((out / "split_summary.json").read_text())["leaks"] == []
    assert '"mos_realism"' in (out / "train.jsonl").read_text()
    again = tmp_path / "again"
    split_manifest(manifest, again, {"validation": 0.2, "test": 0.2})
    assert (again / "test.jsonl").read_text().replace("../", "") == (out / "test.jsonl").read_text().replace("../", "")


def test_without_images_the_split_says_what_it_did_not_look_at(manifest: Path, tmp_path: Path) -> None:
    for path in tmp_path.glob("s*.png"):
        path.unlink()
    done = split_manifest(manifest, tmp_path / "out", {"test": 0.25})
    assert done.notes[0].startswith("12 of 12 source images could not be compared (first s11: nothing")
    told = split_manifest(manifest, tmp_path / "out2", {"test": 0.25}, compare_photographs=False).notes[0]
    assert told == "Source images were not compared: a photograph under two source ids may be in two splits."


def test_a_task_without_a_held_out_source_is_told(tmp_path: Path) -> None:
    samples = [sample(f"s{n}", 0, "rare" if n == 0 else "add") for n in range(12)]
    write_manifest(tmp_path / "m.jsonl", samples)
    done = split_manifest(tmp_path / "m.jsonl", tmp_path / "out", {"test": 0.1}, compare_photographs=False)
    assert "test has no source of rare." in done.notes
