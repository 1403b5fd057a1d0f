"""Recipes: defaults, files, assignments, and errors that name the key, the value and what is allowed."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from speceyes.compile.recipe import Measure, Precision, Recipe, dump_recipe, make_recipe, parse_precision
from speceyes.engines.errors import ConfigError
from speceyes.engines.schema import encode


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_nothing_given_is_the_default() -> None:
    assert make_recipe() == Recipe()
    assert make_recipe(Recipe(keep_graphs=True)).keep_graphs is True


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert make_recipe(write(tmp_path, "# nothing\n")) == Recipe()


def test_a_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: {decoder: int4}\nmeasure: {widths: [2, 4], past: 8}\n")
    recipe = make_recipe(path)
    assert recipe.precision == Precision(decoder="int4", vision="fp32")
    assert recipe.measure == Measure(widths=(2, 4), past=8)


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: {decoder: int4, vision: int8}\nkeep_graphs: true\n")
    recipe = make_recipe(path, {"precision": {"decoder": "fp32"}}, ["keep_graphs=false"])
    assert recipe.precision == Precision("fp32", "int8")
    assert recipe.keep_graphs is False


def test_assignments_are_yaml() -> None:
    assignments = ["measure.widths=[1, 2]", "check.steps=3", "check.decoder.int8.cosine=0.5", "target=onnxruntime-cpu"]
    recipe = make_recipe(assignments=assignments)
    assert recipe.measure.widths == (1, 2)
    assert recipe.check.steps == 3
    assert recipe.check.decoder.int8.cosine == 0.5


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("precison.decoder=int8", "recipe.precison: unknown key; did you mean 'precision'?"),
        ("precision.decodr=int8", "recipe.precision.decodr: unknown key; did you mean 'decoder'?"),
        ("precision.decoder=int2", "recipe.precision.decoder: found 'int2'; allowed: fp32, int8, int4"),
        ("precision.vision=int4", "recipe.precision.vision: found 'int4'; allowed: fp32, int8"),
        ("precision=int8", "recipe.precision: found 'int8'; a mapping is expected"),
        ("target=onnxruntime", "target 'onnxruntime': unknown; did you mean 'onnxruntime-cpu'?"),
        ("check.steps=many", "recipe.check.steps: found 'many'; int is expected"),
        ("check.steps=0", "steps: found 0; 1 to 4096 is allowed"),
        ("check.steps=true", "recipe.check.steps: found True; int is expected"),
        ("check.decoder.int8.cosine=1.5", "cosine: found 1.5; -1 to 1 is allowed"),
        ("check.decoder.int8.cosine=.nan", "cosine: found nan"),
        ("measure.widths=[]", "widths: found []; one or more numbers of at least 1"),
        ("measure.widths=[0]", "widths: found [0]"),
        ("keep_graphs", "--set 'keep_graphs': key=value is expected"),
        ("check..steps=1", "key=value is expected"),
        ("=1", "key=value is expected"),
        ("check.steps=[1", "is not valid YAML"),
    ],
)
def test_a_wrong_assignment_is_named(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe(assignments=[assignment])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "found list; a mapping of options is expected"),
        ("a: [", "not valid YAML"),
        ("keep_graphs: true\nkeep_graphs: false\n", "'keep_graphs' stands twice"),
        ("measure: {past: 1, past: 2}\n", "'past' stands twice"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("1: 2\n", "recipe.1: unknown key"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe(write(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml': it cannot be read"):
        make_recipe(tmp_path / "none.yaml")


def test_precision_in_one_word_or_by_part() -> None:
    assert parse_precision("int8") == {"decoder": "int8", "vision": "int8", "predictor": "int8"}
    assert parse_precision("decoder=int4") == {"decoder": "int4"}
    assert parse_precision(" decoder=int8, vision=fp32 ") == {"decoder": "int8", "vision": "fp32"}
    for text in ("decoder=int8,vision", "decoder=int8,decoder=fp32"):
        with pytest.raises(ConfigError, match="is expected"):
            parse_precision(text)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    recipe = make_recipe(assignments=["precision.decoder=int4", "check.vision.int8.cosine=0.5", "measure.widths=[3]"])
    assert make_recipe(write(tmp_path, dump_recipe(recipe))) == recipe
    assert yaml.safe_load(dump_recipe(recipe)) == encode(recipe)


@given(st.text(max_size=40))
def test_any_assignment_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(make_recipe(assignments=[text]), Recipe)


KEYS = st.sampled_from(["precision", "decoder", "check", "steps", "int8", "cosine"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)


@given(VALUES)
def test_any_changes_are_read_or_refused(value: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(make_recipe(changes={"check": value, "precision": value}), Recipe)
