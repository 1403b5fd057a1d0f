"""A trained text model from elsewhere: Gemma 3 270M out of a GGUF file, compiled, answers as transformers does.

The packages that carry the weights are a third party's, and large: the test runs where they are installed.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import speceyes
import torch
from speceyes.scripts.gguf_checkpoint import missing_packages
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent

MISSING = missing_packages()
PROMPT = "def fibonacci(n):\n"
COUNT = 40

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"packages missing: pip install {' '.join(MISSING)}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma") / "checkpoint"
    script = ROOT / "scripts" / "gguf_checkpoint.py"
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        out = network.generate(**inputs, max_new_tokens=COUNT, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def test_fp32_gives_the_tokens_of_transformers(checkpoint, expected, tmp_path):
    out = tmp_path / "gemma.speceyes"
    speceyes.compile(checkpoint, out, precision={"decoder": "fp32"}, measure={"enabled": False})
    with speceyes.load(out) as model:
        found = model.generate(prompt=PROMPT, max_new_tokens=COUNT)
    assert list(found.token_ids) == expected
    assert "return" in found.text


def test_int8_keeps_to_its_bounds_and_writes_a_function(checkpoint, tmp_path):
    out = tmp_path / "gemma.speceyes"
    speceyes.compile(checkpoint, out, precision={"decoder": "int8"}, measure={"enabled": False})
    with speceyes.load(out) as model:
        found = model.generate(prompt=PROMPT, max_new_tokens=COUNT)
        figures = model.manifest.targets["onnxruntime-cpu"].engines["decoder"].accuracy
    assert figures["agreement"] >= 0.9
    assert found.text.startswith("    if n")
