"""Tables of raw ratings: what is counted, what is refused, and the same scores as from the records."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmm4edit.data.manifest import read_manifest
from lmm4edit.data.mos import Rating, mean_opinion_scores
from lmm4edit.data.ratings import RatingColumns, rate_items
from lmm4edit.errors import ManifestError
from lmm4edit.records import Dimension


def write(path: Path, rows: list[tuple[Any, ...]], header: str = "subject,item,dimension,value") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def simulated() -> list[Rating]:
    rng = np.random.default_rng(0)
    truth = rng.normal(50, 15, 30)
    ratings = [
        Rating(f"s{subject}", f"i{item}", round(float(truth[item] + rng.normal(0, 5)), 1))
        for subject in range(15)
        for item in range(30)
    ]
    # A person who rates at random, and one whose ratings are all equal.
    ratings += [Rating("random", f"i{item}", float(rng.uniform(0, 100))) for item in range(30)]
    return [*ratings, *(Rating("lazy", f"i{item}", 50.0) for item in range(30))]


def test_a_table_gives_the_scores_of_its_ratings(tmp_path: Path) -> None:
    ratings = simulated()
    expected = mean_opinion_scores(ratings)
    assert set(expected.rejected_subjects) == {"random", "lazy"}
    table = write(tmp_path / "r.csv", [(r.subject, r.item, "quality", r.value) for r in ratings])
    done = rate_items(table, tmp_path / "out")
    rows = read(tmp_path / "out" / "mos.csv")
    assert {row["item"]: float(row["mos"]) for row in rows} == expected.mos
    assert {(row["n_ratings"], row["missing_reason"]) for row in rows} == {("17", "")}
    subjects = {row["subject"]: row for row in read(tmp_path / "out" / "subjects.csv")}
    assert len(subjects) == 17
    assert subjects["lazy"]["rejected_reason"].endswith("are outliers, more than 5%")
    told = json.loads((tmp_path / "out" / "mos_summary.json").read_text())
    assert told["dimensions"]["quality"]["rejected_subjects"] == expected.rejected_subjects
    assert told["dimensions"]["quality"]["outlier_share"] == pytest.approx(expected.outlier_fraction)
    assert done.notes == [f"quality: {warning}" for warning in expected.warnings]
    assert done.problems == [] and told["caveats"] == done.notes


def test_bad_rows_are_listed_and_blank_ones_counted(tmp_path: Path) -> None:
    rows = [
        ("a", "1", "quality", 1),
        ("a", "2", "quality", 3),
        ("a", "3", "quality", "n/a"),
        ("a", "1", "quality", 2),
        ("a", "4", "quality", "good"),
        ("", "1", "quality", 2),
        ("b", "1\0", "quality", 2),
        ("b", "1", "Overall Quality", 2),
        ("b", "1", "quality", "inf"),
    ]
    table = write(tmp_path / "r.csv", rows)
    done = rate_items(table, tmp_path / "out")
    assert [str(problem).removeprefix(f"{table}:") for problem in done.problems] == [
        f"5: value: expected one rating for each subject and item, got a second one by 'a' of '1', first in {table}:2. "
        "Keep one, or give repeated sessions their own subject names; the first is used.",
        "6: value: expected a number of at most nine digits, got 'good'. Write it with a decimal point, or leave the "
        "cell empty.",
        "7: subject: expected a name of at most 1000 characters, got ''. Fill it in, or remove the row.",
        "8: item: expected a name of at most 1000 characters, got '1\\x00'. Fill it in, or remove the row.",
        "9: dimension: expected a dimension's name, such as quality, got 'Overall Quality'. Rename the dimension: its "
        "scores stand in the column mos_<name> of manifests.",
        "10: value: expected a number of at most nine digits, got 'inf'. Write it with a decimal point, or leave the "
        "cell empty.",
    ]
    assert done.notes[0] == "1 of 9 ratings are blank and count as missing."
    assert (done.summary["rows"], done.summary["blank_ratings"], done.summary["bad_rows"]) == (9, 1, 6)
    assert (tmp_path / "out" / "mos_problems.jsonl").is_file()


def test_an_item_without_a_valid_rating_has_a_reason(tmp_path: Path) -> None:
    rows = [("a", "1", 1), ("a", "2", 3), ("b", "3", 5)]
    table = write(tmp_path / "r.csv", rows, "who,what,stars")
    columns = RatingColumns("who", "what", "stars", only_dimension="quality")
    rate_items(table, tmp_path / "out", columns)
    last = read(tmp_path / "out" / "mos.csv")[-1]
    assert last["mos"] == "" and last["missing_reason"] == "none of its 1 ratings is left after screening"


def test_scores_in_a_manifest(tmp_path: Path) -> None:
    images = {"source_image": "a.png", "edited_image": "b.png", "instruction": "x"}
    samples = [{"sample_id": str(n), **images, "mos_quality": 7, "mos_alignment": 8} for n in range(4)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    rows = [(s, str(i), d, i * 3 + (s == "b")) for d in ("quality", "realism") for s in "ab" for i in range(3)]
    rows += [("a", "stranger", "quality", 9)]
    table = write(tmp_path / "r.csv", rows)
    done = rate_items(table, tmp_path / "out", manifest=tmp_path / "m.jsonl")
    found = read_manifest(
        tmp_path / "out" / "manifest.jsonl", dimensions=[Dimension(n, "?") for n in ("quality", "alignment", "realism")]
    )
    assert [set(sample.mos) for sample in found] == [{"quality", "alignment", "realism"}] * 3 + [{"alignment"}]
    assert Path(found[0].source_image).resolve() == (tmp_path / "a.png").resolve()
    assert done.notes[-5:] == [
        "No definition of realism: the question in dimensions.yaml is a plain one. Edit it there, or give a file of "
        "dimensions with --dimensions.",
        "1 of 4 edits of the manifest have no quality score.",
        "1 of 4 edits of the manifest have no realism score.",
        "1 rated items are not in the manifest, first 'stranger'; see mos.csv.",
        "4 scores that the manifest had in the rated dimensions were replaced.",
    ]
    assert done.summary["manifest"]["items_not_in_manifest"] == ["stranger"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "subject,item,dimension,values",
            "expected a column for value, got no column 'value'. Did you mean 'values'? Name",
        ),
        ("subject,item,dim,value", "Name it with --dimension-column, or the only dimension with --dimension."),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, header: str, message: str) -> None:
    table = write(tmp_path / "r.csv", [("a", "1", "quality", 1)], header)
    with pytest.raises(ManifestError) as caught:
        rate_items(table, tmp_path / "out")
    assert message in str(caught.value) and not (tmp_path / "out").exists()


def test_a_table_without_a_rating(tmp_path: Path) -> None:
    table = write(tmp_path / "r.csv", [("a", "1", "quality", "")])
    with pytest.raises(ManifestError, match="expected at least one rating, got none"):
        rate_items(table, tmp_path / "out")
