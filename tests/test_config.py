"""Configurations fail early, whole and by path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lmm4edit.config import TrainConfig, build_config, dump_config, load_config
from lmm4edit.errors import ConfigError
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension

CONFIGS = Path(__file__).parents[1] / "configs"


def minimal(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "stage": 1,
        "run_dir": "runs/x",
        "epochs": 1,
        "backbone": {"name_or_path": "b"},
        "data": {"train": "t.jsonl"},
        "objective": {"text_ce": 1.0},
        "optimizer": {"learning_rate": "1e-4"},
        "batch": {"micro_batch_size": 2},
    }
    return {**values, **changes}


def write(path: Path, values: object) -> Path:
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_every_training_configuration_in_the_repository_loads() -> None:
    paths = sorted(path for path in CONFIGS.rglob("*.yaml") if path.stem in ("stage1", "stage2"))
    assert [str(path.relative_to(CONFIGS)) for path in paths] == [
        "ebench18k/stage1.yaml",
        "ebench18k/stage2.yaml",
        "tiny/stage1.yaml",
        "tiny/stage2.yaml",
    ]
    for path in paths:
        assert load_config(path).stage == int(path.stem[-1])


def test_the_paper_s_settings() -> None:
    one, two = (load_config(CONFIGS / f"ebench18k/stage{stage}.yaml") for stage in (1, 2))
    for config in (one, two):
        assert config.optimizer.learning_rate == 1e-4
        assert config.optimizer.schedule == "cosine"
        # 16 accumulated question-rows are 4 packed edits of 3 scores and one answer.
        assert config.batch.micro_batch_size * config.batch.gradient_accumulation * 4 == 16
        assert (config.adapter.kind, config.adapter.vision, config.adapter.llm, config.adapter.projector) == (
            "adalora",
            True,
            True,
            True,
        )
    assert (one.epochs, two.epochs) == (1, 3)
    assert two.starting_checkpoint() == Path(one.run_dir) / "checkpoint"


def test_tiny_stage_2_starts_where_tiny_stage_1_ends() -> None:
    one, two = (load_config(CONFIGS / f"tiny/stage{stage}.yaml") for stage in (1, 2))
    assert two.starting_checkpoint() == Path(one.run_dir) / "checkpoint"
    assert one.adapter == two.adapter and one.prompts == two.prompts and one.backbone == two.backbone


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.0e-4"])
def test_numbers_are_coerced_by_type_although_yaml_reads_some_as_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(minimal()).replace("'1e-4'", text), encoding="utf-8")
    assert load_config(tmp_path / "c.yaml").optimizer.learning_rate == 1e-4


def test_overrides_reach_nested_keys_with_their_yaml_type(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", minimal())
    config = load_config(
        path,
        [
            "optimizer.learning_rate=2e-3",
            "optimizer.betas=[0.9, 0.95]",
            "adapter.dropout=0.1",
            "batch.packed=false",
            "checkpoint.save_every_steps=null",
            "run_dir=runs/a=b",
        ],
    )
    assert config.optimizer.learning_rate == 2e-3
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.adapter.dropout == 0.1
    assert config.batch.packed is False
    assert config.checkpoint.save_every_steps is None
    assert config.run_dir == "runs/a=b"


def test_all_problems_are_reported_together_by_path(tmp_path: Path) -> None:
    values = minimal(
        stage=3,
        epochs="x",
        data=None,
        adapter={"kind": "adalor", "beta1": 1.5},
        optimizer={"learnig_rate": 1e-4},
        batch={"micro_batch_size": True},
        dimensions=["qualty"],
        objective={"text_ce": float("nan")},
    )
    path = write(tmp_path / "c.yaml", values)
    with pytest.raises(ConfigError) as error:
        load_config(path, ["seed", "run_dir.x=1"])
    assert str(error.value) == (
        f"{path}: 12 problems in the configuration:\n"
        "  override 'seed': expected key.sub=value, such as optimizer.learning_rate=1e-4.\n"
        "  override 'run_dir.x=1': run_dir is the value 'runs/x' and has no keys in it.\n"
        "  stage: expected one of 1, 2, got 3.\n"
        "  dimensions.0: expected a built-in dimension or a definition with name and question, got 'qualty'. "
        "Did you mean 'quality'?\n"
        "  epochs: expected a valid integer, got 'x'.\n"
        "  data: expected keys and values, got None.\n"
        "  adapter.kind: expected one of adalora, lora, full, none, got 'adalor'. Did you mean 'adalora'?\n"
        "  adapter.beta1: expected less than 1, got 1.5.\n"
        "  objective.text_ce: expected a finite number, got nan.\n"
        "  optimizer.learning_rate: required, but missing.\n"
        "  optimizer.learnig_rate: unknown key. Did you mean 'learning_rate'?\n"
        "  batch.micro_batch_size: expected a number, got true."
    )


def test_an_unknown_key_with_no_near_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        build_config(minimal(score_head={"zzz": 1}))
    assert str(error.value) == (
        "configuration: 1 problem in the configuration:\n  score_head.zzz: unknown key. Known: inner."
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"objective": {}}, "objective: stage 1 trains words, but text_ce and qa_ce are both 0. Set text_ce: 1.0."),
        (
            {"objective": {"text_ce": 1.0, "score_mse": 0.5}},
            "objective.score_mse: stage 1 trains words and no score head, got 0.5. Set it to 0, or set stage: 2.",
        ),
        (
            {"stage": 2, "objective": {"text_ce": 1.0}, "init_from": "backbone"},
            "objective.score_mse: stage 2 trains the score head, got 0. Set it to 1.0.",
        ),
        (
            {"stage": 2, "objective": {"score_mse": 1.0}},
            "init_from: stage 2 starts from a stage 1 checkpoint, got none. Give its folder (--init-from DIR), or "
            "init_from: backbone to leave stage 1 out on purpose.",
        ),
        ({"dimensions": ["quality", "quality"]}, "dimensions: each may stand once, repeated: quality."),
        (
            {"dimensions": [{"name": "Naïve Score", "question": "?"}]},
            "dimensions.0: Dimension name must be a lower-case identifier such as 'quality', got 'Naïve Score': it "
            "becomes the column mos_<name> of manifests. Rename the dimension.",
        ),
        (
            {"adapter": {"init_r": 4}},
            "adapter.target_r: AdaLoRA only lowers ranks, so expected at most init_r=4, got 8.",
        ),
        (
            {"adapter": {"vision": False, "llm": False}},
            "adapter: kind adalora with vision and llm both false adapts nothing. Set kind: none.",
        ),
        (
            {"adapter": {"kind": "lora", "ranks": "reallocate"}, "init_from": "runs/a"},
            "adapter.ranks: reallocate is for AdaLoRA, got kind lora. Set ranks: continue.",
        ),
        (
            {"adapter": {"ranks": "reallocate"}},
            "adapter.ranks: reallocate grows the ranks of a starting judge, and this run starts from the backbone, "
            "whose fresh adapters are pruned anyway. Set ranks: continue, or name a judge (init_from).",
        ),
        (
            {"adapter": {"kind": "none", "projector": False}},
            "adapter: kind none as configured leaves nothing to train in stage 1.",
        ),
        (
            {"backbone": {"name_or_path": "b", "attn_implementation": "flash_attention_2"}},
            "backbone.attn_implementation: expected one of sdpa, eager, got 'flash_attention_2'.",
        ),
        (
            {"backbone": {"name_or_path": "b", "min_pixels": 9, "max_pixels": 4}},
            "backbone.min_pixels: expected at most max_pixels=4, got 9.",
        ),
        (
            {"validation": {"every_epochs": 1}},
            "data.validation: validation is switched on without a manifest. Name one, or switch it off.",
        ),
        (
            {"data": {"train": "t", "validation": "v"}},
            "validation: data.validation would never be used. Set validation.every_epochs: 1.",
        ),
        (
            {"data": {"train": "t", "validation": "v"}, "validation": {"every_epochs": 1, "every_steps": 5}},
            "validation: give every_epochs or every_steps, not both. Set one of them to null.",
        ),
        (
            {"checkpoint": {"keep_best": True}},
            "checkpoint.keep_best: validation chooses the best judge, and it is off. Set keep_best: false.",
        ),
    ],
)
def test_keys_that_contradict_each_other(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(minimal(**changes))
    assert str(error.value) == f"configuration: 1 problem in the configuration:\n  {problem}"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "{path}: expected keys and values, got nothing."),
        (b"- 1\n", "{path}: expected keys and values, got a list."),
        (b"stage: 1\nstage: 2\n", "{path}:2: not readable as YAML: the key 'stage' stands twice."),
        (b"a:\n  b: 1\n  b: 1\n", "{path}:3: not readable as YAML: the key 'b' stands twice."),
        (b"1: 2\n", "{path}:1: not readable as YAML: the key 1 is no word."),
        (b"a: [1\n", "{path}:2: not readable as YAML: expected ',' or ']', but got '<stream end>'."),
        (b"a: \xff\n", "{path}: the configuration cannot be read: it is not UTF-8 text. Check the path."),
        (None, "{path}: the configuration cannot be read: No such file or directory. Check the path."),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == problem.format(path=path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + yaml.safe_dump(minimal()).encode())
    assert load_config(path).stage == 1


def test_dimensions_are_the_paper_s_unless_named_or_defined() -> None:
    own = {"name": "mood", "question": "Rate the mood.", "low": 1, "high": 5, "higher_is_better": False}
    assert build_config(minimal()).build_dimensions() == BUILT_IN_DIMENSIONS
    assert build_config(minimal(dimensions=["alignment", own])).build_dimensions() == (
        BUILT_IN_DIMENSIONS[1],
        Dimension("mood", "Rate the mood.", 1.0, 5.0, False),
    )


def test_dimensions_are_left_to_the_judge_that_training_starts_from() -> None:
    later = minimal(stage=2, objective={"score_mse": 1}, init_from="runs/a/checkpoint")
    assert build_config(later).build_dimensions() is None
    assert build_config({**later, "dimensions": ["quality"]}).build_dimensions() == BUILT_IN_DIMENSIONS[:1]


def test_init_from_backbone_is_no_folder() -> None:
    config = build_config(minimal(stage=2, objective={"score_mse": 1}, init_from="backbone"))
    assert config.starting_checkpoint() is None


def test_differences_are_named_by_path() -> None:
    one = build_config(minimal())
    two = build_config(minimal(epochs=2, adapter={"dropout": 0.5}))
    assert one.differences(two) == {"epochs": (1, 2), "adapter.dropout": (0.0, 0.5)}
    assert one.differences(one) == {}


@settings(deadline=None)
@given(
    rate=st.floats(1e-9, 10),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20),
    inner=st.none() | st.integers(1, 999),
)
def test_a_dumped_configuration_loads_to_an_equal_one(
    rate: float, betas: tuple[float, float], name: str, inner: int | None
) -> None:
    config = build_config(
        minimal(run_dir=name, optimizer={"learning_rate": rate, "betas": list(betas)}, score_head={"inner": inner})
    )
    assert build_config(yaml.safe_load(dump_config(config))) == config


def test_a_configuration_cannot_be_changed_after_validation() -> None:
    config = build_config(minimal())
    with pytest.raises(ValueError, match="frozen"):
        config.epochs = 5  # type: ignore[misc]
    assert isinstance(config, TrainConfig) and config.epochs == 1


def test_reading_a_configuration_loads_no_torch() -> None:
    code = "import sys, lmm4edit.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
