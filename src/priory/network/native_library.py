"""The C library that runs the operations of a long recorded graph, compiled when it is first needed.

The source, `native_operations.c`, is the same for every graph. Compiling it takes 0.5 s, once per process and dtype.
Where there is no C compiler the graph runs as a Python function.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("native_operations.c")
C_TYPES = {torch.float64: "double", torch.float32: "float"}
# in the order of the codes in the source
OPERATIONS = (
    *("copy", "neg", "exp", "log", "log1p", "sqrt", "tanh", "sigmoid", "abs", "sin", "cos"),
    *("add", "sub", "mul", "div", "pow", "maximum", "minimum", "ge", "gt", "le", "lt", "eq", "ne"),
    *("addcmul", "where", "sum", "max", "dot"),
)
CODES = {name: code for code, name in enumerate(OPERATIONS)}
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILER_SECONDS = 60.0  # after which a compiler is given up


@cache
def native_library(dtype: torch.dtype) -> Any:
    """The function that runs the operations between two addresses on numbers of a dtype; None if it can't be compiled.

    The environment variable CC names the compiler, as for other programs; by default it is cc, gcc or clang.
    """
    names = (os.environ["CC"],) if "CC" in os.environ else COMPILERS
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if dtype not in C_TYPES or compiler is None:
        return None
    for own in (("-march=native",), ()):  # which not every compiler knows
        with tempfile.TemporaryDirectory(prefix="priory-", ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "operations.so"
            command = [compiler, *OPTIONS, *own, f"-DREAL={C_TYPES[dtype]}", "-o", str(file), str(SOURCE), "-lm"]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILER_SECONDS)
                run = ctypes.CDLL(str(file)).run_operations
            except (OSError, AttributeError, subprocess.SubprocessError):
                continue
        run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p), None
        return run
    return None
