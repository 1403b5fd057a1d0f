"""Write the trained model as a Hugging Face checkpoint in half precision: `python -m scripts.demo.export`."""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from .model import create, processor


def export(run: Path, target: Path) -> None:
    """The model saved in the training folder `run`, as a checkpoint folder `target`, replaced as a whole."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run / "tokenizer")
    model = create(tokenizer)
    model.load_state_dict(torch.load(run / "state.pt", weights_only=True)["model"])
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.half().save_pretrained(temporary)
    processor(tokenizer).save_pretrained(temporary)
    for file in temporary.iterdir():
        file.chmod(0o644)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("build/demo-training"), help="folder of the training run")
    parser.add_argument("--out", type=Path, default=Path("scripts/demo/checkpoint"), help="checkpoint folder to write")
    options = parser.parse_args()
    export(options.run, options.out)


if __name__ == "__main__":
    main()
