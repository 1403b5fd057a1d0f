"""The settings: the source document's YAML, units, unknown keys, ranges."""

import pytest
from speceyes.engines.errors import ConfigError
from speceyes.runtime.speculation.settings import (
    Memory,
    Settings,
    Speculation,
    parse_bytes,
    parse_seconds,
    read_settings,
)

DOCUMENT = """
speculation:
  window_size: 3
  warmup_steps: 8
  max_parallel: 2
  fallback_thresh: 0.3
memory:
  cache_size: 256MB
  quant_groups: 8
  release_delay: 5ms
"""


def test_the_documents_yaml_is_read_unchanged(tmp_path):
    path = tmp_path / "speceyes.yaml"
    path.write_text(DOCUMENT)
    settings = read_settings(path)
    assert settings.speculation == Speculation(window_size=3, warmup_steps=8, max_parallel=2, fallback_thresh=0.3)
    assert settings.memory == Memory(cache_size=256_000_000, quant_groups=8, release_delay=0.005)


def test_our_keys_stand_beside_them():
    ours = {"confidence_thresh": 0.8, "long_input_tokens": 512, "long_warmup_steps": 16, "drafters": ["lookup"]}
    speculation = read_settings({"speculation": {**ours, "warmup_steps": 8}}).speculation
    assert (speculation.confidence_thresh, speculation.drafters) == (0.8, ("lookup",))
    assert [speculation.warmup(tokens) for tokens in (1, 512, 513)] == [8, 8, 16]


def test_nothing_gives_the_defaults():
    assert read_settings(None) == read_settings({}) == Settings()


def test_what_is_left_out_is_as_in_the_base():
    base = read_settings({"speculation": {"window_size": 5, "mode": "approximate"}})
    found = read_settings({"speculation": {"mode": "exact"}}, base)
    assert (found.speculation.window_size, found.speculation.mode) == (5, "exact")


@pytest.mark.parametrize(
    ("text", "size"), [("256MB", 256e6), ("1.5GiB", 1.5 * 2**30), ("64 kib", 2**16), ("12B", 12), ("2GB", 2e9)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("5ms", 0.005), ("250us", 0.00025), ("1.5 s", 1.5)])
def test_durations(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"speculation": {"window_sise": 3}}, "window_sise: unknown key; did you mean 'window_size'"),
        ({"speculation": {"window_size": 99}}, "window_size: found 99; 0 to 32 is allowed"),
        ({"speculation": {"drafters": ["oracle"]}}, "drafters: found 'oracle'; allowed: predictor, lookup"),
        ({"speculation": {"mode": "fast"}}, "mode: found 'fast'; allowed: exact, approximate"),
        ({"memory": {"cache_size": "256 parsecs"}}, "units are B, KB"),
        ({"memory": {"cache_size": "many"}}, "a number with a unit is expected"),
        ({"memory": {"release_delay": "5 MB"}}, "units are us, ms, s"),
        ({"speculations": {}}, "did you mean 'speculation'"),
    ],
)
def test_wrong_settings_are_named(values, named):
    with pytest.raises(ConfigError, match=named):
        read_settings(values)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("speculation: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_settings(bad)
    bad.write_text("- 1")
    with pytest.raises(ConfigError, match="a mapping of options"):
        read_settings(bad)
