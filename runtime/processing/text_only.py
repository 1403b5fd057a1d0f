"""Models that read text alone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from ...engines.errors import PromptError
from .prompt import Ids, PreparedImage, count_positions


class TextOnlyLayout:
    """No image token; an image is refused."""

    token: str | None = None

    def prepare(self, image: Image.Image, field: str) -> PreparedImage:
        raise PromptError(f"{field} is an image, but this model reads text alone; leave it out")

    def positions(self, is_feature: npt.NDArray[np.bool_], images: Sequence[PreparedImage]) -> tuple[Ids, int]:
        return count_positions(is_feature)
