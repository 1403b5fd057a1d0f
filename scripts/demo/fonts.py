"""The typefaces of the rendered pages, taken from the fonts that matplotlib installs."""

from functools import cache
from pathlib import Path

import matplotlib
from PIL import ImageFont

FACES = ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSans", "DejaVuSerif-Bold")


@cache
def load(face: str, size: int) -> ImageFont.FreeTypeFont:
    """The face (one of `FACES`) at `size` pixels per em."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(folder / f"{face}.ttf"), size, layout_engine=ImageFont.Layout.BASIC)
