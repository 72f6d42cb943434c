"""Edits of known degree, artefacts of known level, side effects outside the region."""

from __future__ import annotations

import numpy as np
import pytest

from lmm4edit.data.minibench.editing_models import SIMULATED_EDITORS, carry_out, edit_with
from lmm4edit.data.minibench.flaws import ARTEFACTS, COLLATERALS, add_artefact, add_collateral
from lmm4edit.data.minibench.opinions import EditFacts, true_opinions
from lmm4edit.data.minibench.scenes import TEST_PHOTOGRAPHS, TRAIN_PHOTOGRAPHS, generate_scene, load_photograph
from lmm4edit.data.minibench.tasks import HIGH_LEVEL_TASKS, LOW_LEVEL_TASKS, TASKS, build_case

SIZE = 84


def scene(seed: int) -> np.ndarray:
    return generate_scene(np.random.default_rng(seed), SIZE)


def case_of(task: str, seed: int = 0):
    rng = np.random.default_rng(seed)
    return build_case(task, lambda: generate_scene(rng, SIZE), rng)


def test_there_are_the_papers_21_tasks() -> None:
    assert (len(HIGH_LEVEL_TASKS), len(LOW_LEVEL_TASKS), len(TASKS)) == (13, 8, 21)


@pytest.mark.parametrize("task", TASKS)
def test_degree_zero_is_the_source_and_the_edit_grows_with_the_degree(task: str) -> None:
    for seed in range(3):
        case, _ = case_of(task, seed)
        assert np.abs(case.render(0.0) - case.source).max() < 1e-6
        target = case.render(1.0)
        left = [float(np.abs(case.render(d) - target).mean()) for d in (0.0, 0.5, 1.0)]
        assert left[0] > left[1] > left[2] == 0.0
        assert case.instruction and case.question.endswith("?")


@pytest.mark.parametrize("task", TASKS)
def test_the_finished_edit_can_be_seen_and_lies_in_its_region(task: str) -> None:
    case, _ = case_of(task, 5)
    change = np.abs(case.render(1.0) - case.source).mean(-1)
    assert change.max() > 0.15
    outside = change * (case.region < 0.01)
    assert outside.max() < 0.02


@pytest.mark.parametrize("kind", ARTEFACTS)
def test_an_artefact_grows_with_its_level(kind: str) -> None:
    image = scene(3)
    damage = [
        float(np.abs(add_artefact(image, kind, level, np.random.default_rng(1)) - image).mean())
        for level in (0.0, 0.15, 0.5, 1.0)
    ]
    assert damage[0] == 0.0
    assert damage == sorted(damage) and damage[1] > 0.004


@pytest.mark.parametrize("kind", COLLATERALS)
def test_a_side_effect_grows_with_its_level_and_spares_the_region(kind: str) -> None:
    region = np.zeros((SIZE, SIZE), np.float32)
    region[20:50, 20:50] = 1
    image = scene(4)
    amounts = []
    for level in (0.0, 0.2, 0.6, 1.0):
        runs = [add_collateral(image, kind, level, region, np.random.default_rng(seed)) for seed in range(8)]
        amounts.append(float(np.mean([np.abs(run.image - image).mean() for run in runs])))
        assert all(np.abs(run.image - image)[region > 0].max() == 0 for run in runs)
    assert amounts[0] == 0.0 and amounts == sorted(amounts)


def test_opinions_move_with_what_was_done() -> None:
    def opinion(**change: float) -> dict[str, float]:
        facts = {"degree": 0.5, "fidelity": 1.0, "artefact": 0.3, "collateral": 0.3, "restoration": False, **change}
        return true_opinions(EditFacts(**facts))  # type: ignore[arg-type]

    assert opinion(artefact=0.8)["quality"] < opinion()["quality"]
    assert opinion(degree=0.9)["alignment"] > opinion()["alignment"]
    assert opinion(fidelity=0.0)["alignment"] < opinion()["alignment"]
    assert opinion(collateral=0.8)["preservation"] < opinion()["preservation"]


def test_no_photograph_is_on_both_sides() -> None:
    assert not set(TEST_PHOTOGRAPHS) & set(TRAIN_PHOTOGRAPHS)
    assert len(TEST_PHOTOGRAPHS) >= 5 and len(TRAIN_PHOTOGRAPHS) >= 12
    pictures = {name: load_photograph(name) for name in TEST_PHOTOGRAPHS + TRAIN_PHOTOGRAPHS}
    assert all(picture.ndim == 3 and picture.shape[2] == 3 for picture in pictures.values())


def test_an_idle_editor_returns_the_source_and_a_wrong_one_another_edit() -> None:
    case, base = case_of("remove", 2)
    rng = np.random.default_rng(0)
    nothing = {"artefact": ("noise", 0.0), "collateral": ("patch", 0.0)}
    idle = carry_out(case, base, rng, kind="idle", degree=0.8, **nothing)
    assert np.abs(idle.image - case.source).max() < 1e-6 and idle.facts.degree == 0.0
    wrong = carry_out(case, base, rng, kind="wrong", degree=0.8, **nothing)
    assert wrong.facts.fidelity == 0.0 and np.abs(wrong.image - case.source).mean() > 0.005


def test_editors_have_distinct_characters() -> None:
    assert len(SIMULATED_EDITORS) >= 6 and all(e.name.startswith("sim-") for e in SIMULATED_EDITORS)
    means = {}
    for editor in SIMULATED_EDITORS:
        rng = np.random.default_rng(1)
        facts = []
        for seed in range(40):
            case, base = case_of(list(TASKS)[seed % 21], seed)
            facts.append(edit_with(editor, case, base, rng).facts)
        means[editor.name] = np.mean([[f.degree, f.artefact, f.collateral] for f in facts], axis=0)
    names = list(means)
    gaps = [np.abs(means[a] - means[b]).max() for i, a in enumerate(names) for b in names[i + 1 :]]
    assert min(gaps) > 0.05
