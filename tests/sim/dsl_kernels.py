"""Small CuTe-DSL kernels for the simulator's tests, and their PTX (compiled in a child process)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CHILD = """
import sys
from tests.sim import dsl_kernels
dsl_kernels.compile_here(sys.argv[1])
"""


def compile_ptx(name: str, arch: str, folder: Path) -> str:
    """The PTX of one kernel of this file; a process of its own keeps the DSL's settings apart."""
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_LINEINFO": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", _CHILD, name]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    (path,) = folder.glob("*.ptx")
    return path.read_text()


def compile_here(name: str) -> None:
    import cutlass
    import cutlass.cute as cute

    tensor = cute.runtime.make_fake_compact_tensor(
        cutlass.Float32, (cute.sym_int(),), assumed_align=16
    )
    from tests.sim import dsl_bodies

    cute.compile(getattr(dsl_bodies, name), tensor, cutlass.Int32(4))
