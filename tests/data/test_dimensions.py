"""Files of user-defined dimensions, and manifests that have one beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmm4edit.data.check import check_manifest
from lmm4edit.data.dimensions import dimensions_of_manifest, load_dimensions, merge_dimensions, write_dimensions
from lmm4edit.data.manifest import read_manifest
from lmm4edit.errors import ConfigError, ManifestError
from lmm4edit.records import BUILT_IN_DIMENSIONS, QUALITY, Dimension

REALISM = Dimension("realism", "Rate the realism: é.", 1, 5, False, "Realism: whether it could be a photograph.")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_dimensions(tmp_path / "d.yaml", [REALISM, QUALITY])
    assert load_dimensions(tmp_path / "d.yaml") == (REALISM, QUALITY)


def test_a_built_in_dimension_by_name(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text("dimensions: [quality, {name: realism, question: Rate it., low: 1, high: 1e1}]\n")
    assert load_dimensions(tmp_path / "d.yaml") == (QUALITY, Dimension("realism", "Rate it.", 1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dimensions: [qualty]", "dimensions.0: expected a built-in dimension or a definition with name and question"),
        ("dimensions: [{name: realism}]", "dimensions.0.question: required, but missing."),
        ("dimensions: [{name: Real ism, question: x}]", "Dimension name must be a lower-case identifier"),
        ("dimensions: [{name: a, question: x, low: 5, high: 1}]", "expected low < high, got low=5.0 and high=1.0"),
        ("dimensions: [{name: a, question: x, hihg: 1}]", "dimensions.0.hihg: unknown key. Did you mean 'high'?"),
        ("dimensions: [quality, quality]", "dimensions: each may stand once, repeated: quality."),
        ("dimensions: []", "dimensions: expected"),
        ("- quality", "expected keys and values, got a list."),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "d.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_dimensions(tmp_path / "d.yaml")
    assert message in str(caught.value) and str(tmp_path / "d.yaml") in str(caught.value)


def test_a_manifests_own_dimensions_are_known_columns(tmp_path: Path) -> None:
    row = {"sample_id": "1", "source_image": "a", "edited_image": "b", "instruction": "x", "mos_realism": 4.5}
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ManifestError, match="mos_realism"):
        read_manifest(path)
    write_dimensions(tmp_path / "dimensions.yaml", [REALISM])
    assert dimensions_of_manifest(path) == (*BUILT_IN_DIMENSIONS, REALISM)
    assert read_manifest(path)[0].mos == {}, "known, but not asked for"
    assert read_manifest(path, dimensions=dimensions_of_manifest(path))[0].mos == {"realism": 4.5}
    kinds = [problem.kind for problem in check_manifest(path, decode_images=False)]
    assert kinds == ["missing_image", "missing_image"]


def test_of_one_name_the_last_definition_counts() -> None:
    mine = Dimension("quality", "How good?")
    assert merge_dimensions(BUILT_IN_DIMENSIONS, [mine])[0] == mine
    assert len(merge_dimensions(BUILT_IN_DIMENSIONS, [mine, REALISM])) == 4
