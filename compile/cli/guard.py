"""Exit codes: whatever a command raises becomes one line on stderr, never a traceback."""

import os
import sys
import traceback
from collections.abc import Callable

import click

from ...engines.errors import SpecEyesError

TRACEBACK = "SPECEYES_TRACEBACK"
COMPILER_MODULES = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "psutil", "polygraphy")


def guard(command: Callable[[], object]) -> int:
    """Run `command`; give the exit code. With SPECEYES_TRACEBACK=1 the traceback of a failure is printed as well."""
    try:
        result = command()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return _fail(130, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.ClickException as fault:
        fault.show()
        return fault.exit_code
    except SpecEyesError as fault:
        return _fail(1, f"error: {_one_line(fault)}")
    except MemoryError:
        return _fail(1, "error: the machine ran out of memory")
    except OSError as fault:
        return _fail(1, f"error: {_one_line(fault)}")
    except Exception as fault:
        if isinstance(fault, ModuleNotFoundError) and fault.name in COMPILER_MODULES:
            return _fail(1, f"error: {fault.name} is missing; install the compiler too: pip install 'PATH[compile]'")
        name = type(fault).__name__
        return _fail(1, f"error: unexpected {name}: {_one_line(fault)} (set {TRACEBACK}=1 to see the traceback)")


def _fail(code: int, message: str) -> int:
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exc()
    print(message, file=sys.stderr)
    return code


def _one_line(fault: BaseException) -> str:
    return " ".join(str(fault).split())
