"""The compiler: checkpoint → canonical graphs → engines → checks → bundle. The package itself is callable."""

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import Build
    from .recipe import Recipe


def compile(
    checkpoint: "str | os.PathLike[str]",
    out: "str | os.PathLike[str]",
    *,
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    **changes: Any,
) -> "Build":
    """Compile a checkpoint into the bundle `out`.

    `checkpoint`: a folder in the Hugging Face format or a hub id. `recipe`: a YAML file or a Recipe, the defaults when
    None; `changes` are recipe keys that override it: `precision={"decoder": "int4"}`. Raises SpecEyesError.
    """
    from .build import build
    from .recipe import make_recipe

    return build(checkpoint, out, make_recipe(recipe, changes))


class _Callable(ModuleType):
    __call__ = staticmethod(compile)


sys.modules[__name__].__class__ = _Callable
