"""What a scorer is, and the table of all of them.

A scorer gives numbers (or words) for edits. It states in its :class:`ScorerInfo` what it needs, in which direction and
range its values run, where its definition comes from and under which licence, so that nothing downstream knows it by
name.

The table maps a name to ``"module:factory"``; a module is imported only when its scorer is built. A package adds its
own with an entry point in the group ``lmm4edit.scorers``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from lmm4edit.errors import ScorerError
from lmm4edit.records import SCORE, EditSample, Prediction

ENTRY_POINT_GROUP = "lmm4edit.scorers"


@dataclass(frozen=True)
class ScorerInfo:
    """What one wants to know of a scorer before using it.

    Attributes:
        name: the name its predictions carry, for example ``"ssim"`` or ``"judge:runs/stage2/checkpoint"``.
        family: ``"fr_handcrafted"``, ``"nr_deep"``, ``"lmm"``...
        needs: which of ``"edited"``, ``"source"``, ``"instruction"``, ``"question"`` it looks at.
        targets: what it predicts: ``("score",)`` for one number that serves for every dimension, or the dimensions'
            names, and ``"answer"`` for the yes/no question.
        higher_is_better: whether a larger number means a better edit.
        low, high: range of its values; ``None`` where it is open.
        on_opinion_scale: its numbers are meant as MOS on 0-100, so plain RMSE against MOS makes sense.
        paper, implementation, code_license, weights_license: where it comes from and what it may be used for.
        notes: choices of definition that a reader of the numbers should know.
        fingerprint: identifies what decides its values beyond the name (weights, settings); a run is resumed only with
            the same one.
    """

    name: str
    family: str
    needs: frozenset[str]
    targets: tuple[str, ...] = (SCORE,)
    higher_is_better: bool = True
    low: float | None = None
    high: float | None = None
    on_opinion_scale: bool = False
    paper: str = ""
    implementation: str = ""
    code_license: str = ""
    weights_license: str = ""
    notes: str = ""
    fingerprint: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    def as_record(self) -> dict[str, object]:
        """Plain values, to be stored beside the predictions."""
        return {**asdict(self), "needs": sorted(self.needs), "targets": list(self.targets), "extra": dict(self.extra)}

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> ScorerInfo:
        """The inverse of :meth:`as_record`; unknown keys of later versions are left out."""
        known: dict[str, Any] = {key: value for key, value in record.items() if key in cls.__dataclass_fields__}
        known["needs"] = frozenset(known.get("needs", ()))
        known["targets"] = tuple(known.get("targets", ()))
        return cls(**known)


@runtime_checkable
class Scorer(Protocol):
    """Anything that scores edits: a metric, our judge, another model.

    ``score`` returns one inner list per sample, in order, with one :class:`~lmm4edit.records.Prediction` per target.
    A sample that cannot be scored gives predictions with ``value=None`` and the reason; it never raises for one bad
    image. The values do not depend on how samples are batched.
    """

    info: ScorerInfo

    def score(self, samples: Sequence[EditSample]) -> list[list[Prediction]]: ...


@dataclass(frozen=True)
class ScorerRow:
    """One row of the table: how to build a scorer and how to call for it.

    Attributes:
        factory: ``"module:callable"``.
        takes: what stands after the colon of ``name:argument``; empty for a scorer that takes none.
        summary: half a line for listings.
        options: fixed keyword arguments of the factory.
    """

    factory: str
    summary: str
    takes: str = ""
    options: Mapping[str, object] = field(default_factory=dict)


_ROWS: dict[str, ScorerRow] = {
    "mse": ScorerRow("lmm4edit.scorers.pixel:build_mse", "mean squared error, source against edited"),
    "psnr": ScorerRow("lmm4edit.scorers.pixel:build_psnr", "peak signal-to-noise ratio, source against edited"),
    "ssim": ScorerRow("lmm4edit.scorers.pixel:build_ssim", "structural similarity, source against edited"),
    "judge": ScorerRow(
        "lmm4edit.scorers.edit_judge:build_edit_judge",
        "a trained judge, scores from its score head",
        takes="checkpoint folder",
        options={"read_out": "head"},
    ),
    "judge-text": ScorerRow(
        "lmm4edit.scorers.edit_judge:build_edit_judge",
        "a trained judge, scores parsed from the text it writes",
        takes="checkpoint folder",
        options={"read_out": "text"},
    ),
}


def scorer_table() -> dict[str, ScorerRow]:
    """Name -> row: the built-in scorers and those of installed packages.

    Raises:
        ScorerError: an installed package claims a name that is taken.
    """
    rows = dict(_ROWS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in rows:
            raise ScorerError(
                f"Scorer {point.name!r} of entry point {point.value!r}: this name is taken by "
                f"{rows[point.name].factory!r}. Rename it in the package's {ENTRY_POINT_GROUP!r} entry points."
            )
        owner = f"from {point.dist.name}" if point.dist else "from an installed package"
        rows[point.name] = ScorerRow(point.value, owner, takes="optional argument")
    return rows


def build_scorer(spec: str, **options: object) -> Scorer:
    """Build a scorer from ``name`` or ``name:argument`` (``judge:checkpoints/tiny/judge``).

    Args:
        spec: what to build; a leading ``label=`` is not part of it (the runner takes that off).
        options: passed to the factory (for the judge: ``device``, ``batch_size``...).

    Raises:
        ScorerError: unknown name, missing or superfluous argument, or the scorer cannot run here.
    """
    name, colon, argument = spec.partition(":")
    table = scorer_table()
    row = table.get(name)
    if row is None:
        raise ScorerError(_unknown(name, table))
    if colon and not argument:
        raise ScorerError(f"Scorer {spec!r}: expected something after the colon ({row.takes or 'or no colon at all'}).")
    if argument and not row.takes:
        raise ScorerError(f"Scorer {name!r} takes no argument, got {argument!r}. Write {name!r} alone.")
    if not argument and row.takes and not row.takes.startswith("optional"):
        raise ScorerError(f"Scorer {name!r} needs a {row.takes}: write {name}:PATH.")
    factory = _import(row.factory, name)
    scorer = factory(*([argument] if argument else []), **{**row.options, **options})
    if not isinstance(scorer, Scorer):
        raise ScorerError(
            f"Scorer {name!r}: {row.factory} returned a {type(scorer).__name__} without info and score()."
        )
    return scorer


def _import(target: str, name: str) -> Callable[..., object]:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise ScorerError(
            f"Scorer {name!r}: cannot load {target!r}: {error}. Is everything it needs installed?"
        ) from error


def _unknown(name: str, table: Mapping[str, ScorerRow]) -> str:
    near = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    known = ", ".join(
        f"{key}:PATH" if row.takes and "optional" not in row.takes else key for key, row in sorted(table.items())
    )
    return f"Unknown scorer {name!r}.{hint} Known: {known}."
