"""Pixels and token ids, equal to what each family's transformers processor gives."""

from .config import ProcessingConfig
from .golden import verify_golden
from .processor import Processor
from .prompt import ImageSource, Prompt, Tile
from .stream import StopMatcher, TextStream
from .text import Tokenizer

__all__ = [
    "ImageSource",
    "ProcessingConfig",
    "Processor",
    "Prompt",
    "StopMatcher",
    "TextStream",
    "Tile",
    "Tokenizer",
    "verify_golden",
]
