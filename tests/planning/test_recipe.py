"""Recipes: read from YAML, checked key by key, and refused with the key, its value and what is allowed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nets import data, mlp

import cmrc
from cmrc.errors import CmrcError, RecipeError
from cmrc.planning.recipe import ALLOWED, PRESETS, Recipe, json_schema, make_recipe


def test_recipes_are_read_from_yaml_and_overridden(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("preset: joint\nkeep: {acts.0: 0.5, acts.1: 3}\nridge: loo\nseed: 3\n")
    recipe = make_recipe(tmp_path / "recipe.yaml", seed=4)
    assert (recipe.method.objective, recipe.method.select, recipe.method.replace) == ("logit", "joint", "affine")
    assert (recipe.seed, recipe.method.ridge, recipe.keep) == (4, "loo", {"acts.0": 0.5, "acts.1": 3})
    assert recipe.needs == {"moments", "scatter", "rows"}
    assert make_recipe(recipe) == recipe


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("ridge: 1e-6\ndrift_ridge: 1.5E+2\nkeep: 64\nminimum: 0.25\n")
    recipe = make_recipe(tmp_path / "recipe.yaml")
    assert (recipe.ridge, recipe.drift_ridge, recipe.keep, recipe.minimum) == (1e-6, 150.0, 64, 0.25)
    same = make_recipe(keep={"a": np.int64(3)}, ridge=np.float32(0.5), seed=np.int64(2))
    assert (same.keep, same.ridge, same.seed) == ({"a": 3}, 0.5, 2)


def test_every_key_says_what_it_may_be() -> None:
    assert set(ALLOWED) == set(Recipe.__slots__)
    properties = json_schema()["properties"]
    assert {name: entry["description"] for name, entry in properties.items()} == ALLOWED


REFUSED = {
    "kept: 0.5": ("'kept' is not a key of a recipe", "did you mean 'keep'?"),
    "3: 0.5": ("3 is not a key of a recipe", "see docs/planning.md for the keys of a recipe"),
    "preset: jiont": ("the preset 'jiont' is not known", "did you mean 'joint'?"),
    "preset: best": ("the preset 'best' is not known", f"use auto, or one of {', '.join(PRESETS)}"),
    "objective: hope": (
        "objective is 'hope'",
        "objective is one of variance, logit, task, block, removal, norm, taylor, magnitude, random",
    ),
    "keep: [1]": ("keep is [1]", f"keep is {ALLOWED['keep']}"),
    "keep: 1.5": ("keep is 1.5", f"keep is {ALLOWED['keep']}"),
    "keep: 0": ("keep is 0", f"keep is {ALLOWED['keep']}"),
    "keep: true": ("keep is True", f"keep is {ALLOWED['keep']}"),
    "keep: {a: 0.5, b: -1}": ("keep.b is -1", f"keep is {ALLOWED['keep']}"),
    "schedule: [0.5, .inf]": ("schedule[1] is inf", f"schedule is {ALLOWED['schedule']}"),
    "batch: 0": ("batch is 0", "batch is a whole number, 1 or more"),
    "batch: 1.0": ("batch is 1.0", "batch is a whole number, 1 or more"),
    "multiple_of: 0": ("multiple_of is 0", "multiple_of is a whole number, 1 or more, or one by site or glob"),
    "ridge: .nan": ("ridge is nan", 'ridge is a number, 0 or more, or "loo"'),
    "ridge: -1": ("ridge is -1", 'ridge is a number, 0 or more, or "loo"'),
    "drift_ridge: .inf": ("drift_ridge is inf", "drift_ridge is a number, 0 or more"),
    "seed: -4": ("seed is -4", "seed is a whole number, 0 or more"),
    "seed: '4'": ("seed is '4'", "seed is a whole number, 0 or more"),
    "draws: 0": ("draws is 0", "draws is a whole number, 1 or more"),
    "clip: 1": ("clip is 1", "clip is true or false"),
    "clip_scores: 1": ("clip_scores is 1", "clip_scores is true or false"),
    "gradient: 0": ("gradient is 0", "gradient is true or false"),
    "loss: hinge": ("loss is 'hinge'", "loss is one of cross-entropy, kl, logit, squared-error"),
    "interchange: 1": ("interchange is 1", "interchange is the probability of a swap: 0 or more, below 1"),
    "sites: acts": ("sites is 'acts'", "sites is a list of site names or globs"),
    "budget: {of: time, amount: 1}": ("budget.of is 'time'", f"budget is {ALLOWED['budget']}"),
    "budget: {of: macs, amount: 0}": ("budget.amount is 0", f"budget is {ALLOWED['budget']}"),
    "budget: {of: macs}": ("budget has no 'amount'", f"budget is {ALLOWED['budget']}"),
    "budget: {of: macs, amount: 1, per: 2}": ("budget.per is 2", f"budget is {ALLOWED['budget']}"),
    "keep: 0.5\nbudget: {of: macs, amount: 0.5}": (
        "keep and budget are both given, and each decides how many units stay",
        "leave out keep to meet the budget, or leave out budget to keep what keep says",
    ),
    "- 3": ("is not a mapping of keys to values", "write a YAML file with lines like `keep: 0.5`"),
    "seed: 1\nseed: 2": (
        'is not YAML: a key occurs twice in "<unicode string>", line 1, column 1: seed: 1 ^',
        "write a YAML file with lines like `keep: 0.5`",
    ),
    "a: " + "[" * 5000: ("is nested too deeply", "write a YAML file with lines like `keep: 0.5`"),
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:30])
def test_bad_recipes_are_refused_with_the_key(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        make_recipe(path)
    assert (caught.value.reason, caught.value.fix) == REFUSED[text]
    assert caught.value.at == str(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"keep: \xff\xfe", "is not a text file in UTF-8"),
        (b"a: [", "is not YAML"),
        (b"keep: !!python/object/apply:os.system ['touch ran']", "is not YAML: could not determine a constructor"),
        (b"#" * (2**20 + 1), "the file has more than 1048576 bytes"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_files_that_are_not_recipes_are_refused(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        make_recipe(path)
    assert caught.value.reason.startswith(reason)
    assert (caught.value.at, caught.value.fix) == (str(path), "write a YAML file with lines like `keep: 0.5`")
    assert not Path("ran").exists()


def test_a_bomb_of_aliases_is_refused_in_no_time(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (tmp_path / "recipe.yaml").write_text("\n".join([*lines, "sites: *a59"]))
    with pytest.raises(RecipeError, match="'a0' is not a key of a recipe"):
        make_recipe(tmp_path / "recipe.yaml")
    nested: list[object] = ["x", "x"]
    for _ in range(60):
        nested = [nested, nested]
    with pytest.raises(RecipeError, match=r"^recipe: sites\[0\] is \[\[\[\.\.\.\], \[\.\.\.\]\]"):
        make_recipe({"sites": nested})


def test_certify_and_budget_exclude_each_other() -> None:
    x, _ = data(10, 5)
    with pytest.raises(RecipeError, match="both certify and budget decide how many units stay"):
        cmrc.plan(mlp(), data=[x], certify="iia>=0.5", held_out=[x], budget={"of": "macs", "amount": 0.5})


WHOLE = (
    "preset: joint\nkeep: {acts.0: 0.5, acts.1: 3}\nridge: loo\nbudget: null\nschedule: [0.7, 12]\nseed: 3\nbatch: 16\n"
)
WORDS = st.sampled_from(["true", ".nan", "-1", "0", "1e999", "null", "!!set", "&a", "*a", "[", "{", "}", "? ", "\0", "é", "0x1F", "12:30:45", "<<: {}", "--- ", "2001-01-01", "=", "!!binary a", "1_0"])  # fmt: skip


@st.composite
def mutated_text(draw: st.DrawFn) -> bytes:
    text = WHOLE
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 8)))
        text = text[:start] + draw(WORDS | st.text(max_size=4)) + text[end:]
    return text.encode("utf-8", "surrogatepass") + draw(st.sampled_from([b"", b"", b"\xff"]))


@given(mutated_text())
def test_any_other_file_is_a_recipe_or_an_error_of_cmrc(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_bytes(content)
    with suppress(CmrcError):
        assert isinstance(make_recipe(path), Recipe)
