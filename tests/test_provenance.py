"""Provenance and fingerprints."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmm4edit import provenance
from lmm4edit.provenance import PACKAGES, collect_provenance, file_sha256, fingerprint, jsonable

ROOT = Path(__file__).parents[1]


def test_what_is_collected() -> None:
    found = collect_provenance(seed=3, manifest={"sha256": "abc"})
    assert set(found) == {
        *("lmm4edit", "python", "packages", "platform", "cpu", "cpu_count", "time", "argv"),
        *("seed", "manifest"),
    }
    assert (found["seed"], found["manifest"]) == (3, {"sha256": "abc"})
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(found["packages"]) == set(PACKAGES)
    assert found["packages"]["numpy"] == np.__version__
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found["time"])).total_seconds()) < 60
    assert found["cpu"]
    assert json.loads(json.dumps(found)) == found


def test_entries_must_not_hide_collected_ones() -> None:
    with pytest.raises(ValueError) as caught:
        collect_provenance(python="2", time=0)
    assert str(caught.value) == "Provenance collects python, time itself: give the entry another name."


def test_the_command_does_not_tell_where_the_user_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    arguments = [f"{here}/a.jsonl", f"--out={here}/runs", f"{home}/b", str(here), f"{here}more/x", "/data/c", "plain"]
    monkeypatch.setattr(sys, "argv", [f"{tmp_path}/bin/lmm4edit", *arguments])
    assert collect_provenance()["argv"] == [
        *("lmm4edit", "./a.jsonl", "--out=./runs", "~/b", ".", f"{here}more/x", "/data/c", "plain"),
    ]


def git(folder: Path, *arguments: str) -> str:
    options = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def commit_of(folder: Path) -> dict[str, object]:
    """What the package says of its commit when it runs from ``folder``."""
    code = "import json; from lmm4edit.provenance import collect_provenance as c; print(json.dumps(c()['lmm4edit']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("git") is None, reason="NOT TESTED: git is not installed")
def test_the_commit_is_that_of_this_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/of/another/repository")
    package = tmp_path / "clone" / "lmm4edit"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    text = Path(provenance.__file__).read_text()
    (package / "provenance.py").write_text(text)
    reason = "not running from a git checkout"
    assert {key: commit_of(package.parent)[key] for key in ("commit", "dirty", "commit_reason")} == {
        "commit": None,
        "dirty": None,
        "commit_reason": reason,
    }
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "somebody's repository around the package")
    assert commit_of(package.parent)["commit_reason"] == reason
    git(package.parent, "init", "-q")
    assert commit_of(package.parent)["commit_reason"] == "the checkout has no commit"
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "ours")
    head = git(package.parent, "rev-parse", "HEAD")
    clean = commit_of(package.parent)
    assert (clean["commit"], clean["dirty"]) == (head, False)
    (package / "provenance.py").write_text(f"{text}\n# changed\n")
    changed = commit_of(package.parent)
    assert (changed["commit"], changed["dirty"]) == (head, True)
    (package.parent / ".git" / "HEAD").write_text("damaged")
    assert commit_of(package.parent)["commit_reason"] == "git cannot read the checkout"


def test_no_heavy_package_is_loaded() -> None:
    code = (
        "import sys; from lmm4edit.provenance import collect_provenance; collect_provenance(); "
        "print([name for name in ('torch', 'transformers', 'numpy', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- fingerprints --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    x: float
    names: tuple[str, ...] = ()


def test_fingerprints_are_those_of_canonical_json() -> None:
    expected = hashlib.sha256(b'{"a":[1,2.5,null,true],"b":"\\u732b"}').hexdigest()
    assert fingerprint({"b": "猫", "a": [1, 2.5, None, True]}) == expected


def test_what_counts_as_equal() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint(Point(1.0, ("x",))) == fingerprint({"names": ["x"], "x": 1.0})
    assert fingerprint({"p": Path("a/b")}) == fingerprint({"p": "a/b"})
    assert fingerprint({"b", "a"}) == fingerprint(["a", "b"])
    assert fingerprint(number for number in (1, 2)) == fingerprint([1, 2])


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, "1"), (None, "null"), ([], {}), (["ab"], ["a", "b"]), (0, False)]
)
def test_what_counts_as_different(one: object, other: object) -> None:
    assert fingerprint(one) != fingerprint(other)


@given(st.dictionaries(st.text(), st.integers() | st.text(), max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_keys_never_matters(values: dict[str, object], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(values.items())
    random.shuffle(shuffled)
    assert fingerprint(dict(shuffled)) == fingerprint(values)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: 2}, "Expected text as key, got 1."),
        ({"a": [b"x"]}, "Expected something that JSON can hold, got bytes b'x'."),
        ({"a": Point}, f"Expected something that JSON can hold, got type {Point!r}."),
    ],
)
def test_what_has_no_form_in_json(value: object, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        jsonable(value)
    assert str(caught.value) == message


def test_numbers_that_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="^Out of range float values are not JSON compliant"):
        fingerprint([float("nan")])


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 100_000)
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"abc" * 100_000).hexdigest()
