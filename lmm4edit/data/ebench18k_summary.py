"""What an import of EBench-18K tells: counts for programs, and caveats in sentences for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmm4edit.data.ebench18k import DIMENSION_OF_KIND, Kind
from lmm4edit.data.output_folder import count_by
from lmm4edit.data.photographs import PhotographReport
from lmm4edit.data.splits import Leak
from lmm4edit.records import EditSample

IMAGE_FOLDERS = ("sourceimg_h", "targetimg_h", "sourceimg_l", "targetimg_l")
"""Folders of the release's images."""


def describe_samples(samples: Sequence[EditSample]) -> dict[str, Any]:
    """Counts of one split."""
    names = DIMENSION_OF_KIND.values()
    return {
        "samples": len(samples),
        "sources": len({s.source_id for s in samples}),
        "editing_models": len({s.editing_model for s in samples}),
        "tasks": count_by(s.edit_task for s in samples),
        "scores": {name: sum(name in s.mos for s in samples) for name in names},
        "scores_outside_0_100": sum(not 0 <= score <= 100 for s in samples for score in s.mos.values()),
        "answers": count_by(s.answer for s in samples if s.answer is not None),
    }


def describe_photographs(report: PhotographReport | None, has_images: bool, wanted: bool) -> dict[str, Any]:
    """Groups and pairs of sources that show one photograph, or why they were not looked for."""
    if report is None:
        reason = "not asked for" if not wanted else "not done" if has_images else "the images are not here"
        return {"compared": 0, "reason": reason, "groups": None}
    pairs = [[*pair, correlation] for pair, correlation in report.correlations.items()]
    groups = [list(group) for group in report.groups]
    return {"compared": report.n_compared, "not_compared": report.not_compared, "groups": groups, "pairs": pairs}


def explain_answers(splits: Mapping[str, Sequence[EditSample]]) -> dict[str, Any] | None:
    """Whether the answers say more than the alignment scores do."""
    rows = [
        (s.mos["alignment"], s.answer) for rows in splits.values() for s in rows if s.answer and "alignment" in s.mos
    ]
    yes = [score for score, answer in rows if answer == "yes"]
    no = [score for score, answer in rows if answer == "no"]
    if not yes or not no:
        return None
    return {
        "n": len(rows),
        "highest_alignment_of_a_no": max(no),
        "lowest_alignment_of_a_yes": min(yes),
        "answers_follow_from_alignment": max(no) < min(yes),
        "majority_share": max(len(yes), len(no)) / len(rows),
    }


def tell_import(
    summary: Mapping[str, Any],
    files: Mapping[str, Mapping[Kind, Path]],
    leaks: Sequence[Leak],
    out: Path,
    image_root: str | Path | None,
) -> list[str]:
    """What a person should know, a sentence each; the same sentences are the summary's ``caveats``."""
    notes = []
    absent = [name for name in ("train", "test") if "all" not in files and name not in files]
    if absent:
        notes.append(f"The release's folder has no {' and no '.join(absent)} files: that part is not imported.")
    for split, paths in files.items():
        lacking = [kind for kind in ("v", "e", "c", "yn") if kind not in paths]
        if lacking:
            notes.append(f"{split}: no file for {', '.join(lacking)}; those values are missing in every row.")
    images = summary["images"]
    if images["found"] == 0:
        where = f"{out}" if image_root is None else f"{image_root}"
        notes.append(
            f"Images are missing: 0 of {images['expected']} found. Training and scoring need them. Unpack the "
            f"release's {', '.join(IMAGE_FOLDERS)} into {where}, or import again with --image-root FOLDER --overwrite; "
            "until then `lmm4edit data check --no-images` checks the rest."
        )
    elif images["found"] < images["expected"]:
        folders = ", ".join(f"{name} {count}" for name, count in images["missing_by_folder"].items())
        notes.append(
            f"{images['expected'] - images['found']} of {images['expected']} images are missing ({folders}): "
            "`lmm4edit data check --no-decode` lists them; training leaves such edits out."
        )
    photographs = summary["recurring_photographs"]
    if photographs["groups"] is None:
        notes.append(
            f"Recurring photographs were not looked for ({photographs['reason']}). The release uses 18 photographs in "
            "several tasks, so a split by source id alone can show a test photograph in training."
        )
    else:
        notes.append(
            f"Photographs that recur under several source ids: {len(photographs['groups'])}; in more than one split: "
            f"{sum(leak.kind == 'photograph' for leak in leaks)}."
        )
    if shared := [leak for leak in leaks if leak.kind == "source"]:
        notes.append(f"Sources that stand in more than one split: {len(shared)}, first {shared[0].sources[0]}.")
    outside = sum(split["scores_outside_0_100"] for split in summary["splits"].values())
    if outside:
        notes.append(f"{outside} scores are outside 0-100, which Eq. 1 of the paper allows; they are kept.")
    answers = summary["answers"]
    if answers and answers["answers_follow_from_alignment"]:
        notes.append(
            "The yes/no answers follow from the alignment score: every no has at most "
            f"{answers['highest_alignment_of_a_no']:g}, every yes at least {answers['lowest_alignment_of_a_yes']:g}. "
            "They say nothing that the alignment score does not, and their shares differ from the human accuracy in "
            f"the paper's Table 5. Always giving the more frequent answer is right in {answers['majority_share']:.2%}."
        )
    notes.append("Editing models are named by matching the paper's Table 5; the release has numbers only.")
    notes.append("Low-level sources overlap those of I2EBench: say so beside zero-shot results on either.")
    return notes
