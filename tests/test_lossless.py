"""`verify-lossless`: it says that nothing differs, and finds what does."""

import json

import pytest
from speceyes.compile.cli import run
from speceyes.compile.lossless import verify_lossless
from speceyes.engines.errors import ConfigError
from speceyes.runtime import rounds
from speceyes.runtime.speculation.acceptance import Acceptance
from speceyes.runtime.speculation.journal import loads

from .bundles import bundle, picture


@pytest.mark.parametrize(("family", "precision"), [("idefics3", "int8"), ("qwen2_vl", "fp32"), ("gpt2", "int8")])
def test_nothing_differs(family, precision):
    found = verify_lossless(bundle(family, precision), threads=1, max_new_tokens=12)
    assert found.divergence is None
    assert found.answers == 2 * 4 * found.requests
    assert found.drafted > found.accepted > 0


def test_prompts_come_from_a_file_and_json_goes_out(tmp_path, capsys):
    picture("square").save(tmp_path / "a.png")
    lines = [{"messages": "what is it?", "images": ["a.png"]}, {"messages": "and now?", "max_new_tokens": 5}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["verify-lossless", str(bundle("idefics3")), "--prompts", str(tmp_path / "r.jsonl"), "--json"]
    assert run([*arguments, "--max-new-tokens", "10", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["answers"], found["divergence"]) == (2, 16, None)
    assert run([*arguments[:3], str(tmp_path / "none.jsonl")]) == 1
    assert "the file cannot be read" in capsys.readouterr().err


def test_a_wrong_acceptance_is_found_with_margin_and_journal(monkeypatch, capsys):
    def take_everything(branches, logits, chooser, tolerance=None):
        last = chooser.choose(logits[0][len(branches[0])], branches[0])
        return Acceptance(0, (*branches[0], last))

    monkeypatch.setattr(rounds, "accept", take_everything)
    found = verify_lossless(bundle("llama"), threads=1, max_new_tokens=12).divergence
    assert found is not None
    assert found.margin > 0
    assert found.plain_token != found.speculative_token
    assert len(list(loads(found.journal))) > 2
    assert run(["verify-lossless", str(bundle("llama")), "--threads", "1", "--max-new-tokens", "12"]) == 1
    out = capsys.readouterr().out
    assert "logit margin" in out
    assert '"event": "Propose"' in out


def test_approximate_mode_makes_no_promise():
    with pytest.raises(ConfigError, match="only 'exact' promises"):
        verify_lossless(bundle("llama"), settings={"speculation": {"mode": "approximate"}})
