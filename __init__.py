"""SpecEyes: compile a vision-language model into engines once; answer from them sooner, with the same tokens."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "compile", "load"]

if TYPE_CHECKING:
    from .compile import compile as compile
    from .runtime.session import load as load


def __getattr__(name: str) -> Any:
    if name == "load":
        from .runtime.session import load

        return load
    if name == "compile":
        from importlib import import_module

        return import_module(".compile", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
