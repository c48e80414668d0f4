"""What native execution costs: building the library, encoding a kernel, one instruction, one call.

    python -m benchmarks.sim_jit [--ptx FILE] [--json FILE]

Times of native code are the best of several, others are processor time (other work on the machine
doesn't count). Without --ptx a synthetic kernel of 5000 instructions is encoded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fa_cute.sim import jit, ptx
from fa_cute.sim.jit.library import library
from fa_cute.sim.jit.packs import PACKS

_HEADER = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 p0)
{
.reg .pred %p<8>;
.reg .b16 %rs<8>;
.reg .b32 %r<64>;
.reg .b64 %rd<64>;
"""

# Operands rotate over registers so that neighbours are independent, as in unrolled kernels.
INSTRUCTIONS = {
    "add.f32": "add.f32 %r{a}, %r{b}, %r{c};",
    "fma.rn.f32": "fma.rn.f32 %r{a}, %r{b}, %r{c}, %r{b};",
    "fma.rn.f32x2": "fma.rn.f32x2 %rd{a}, %rd{b}, %rd{c}, %rd{b};",
    "add.rm.f32x2": "add.rm.f32x2 %rd{a}, %rd{b}, %rd{c};",
    "max.f32": "max.f32 %r{a}, %r{b}, %r{c};",
    "ex2.approx.ftz.f32": "ex2.approx.ftz.f32 %r{a}, %r{b};",
    "cvt.rn.bf16x2.f32": "cvt.rn.bf16x2.f32 %r{a}, %r{b}, %r{c};",
    "mov.b64 pack": "mov.b64 %rd{a}, {{%r{b}, %r{c}}};",
    "setp.eq.b32": "setp.eq.b32 %p1, %r{b}, 0;",
    "selp.b32": "selp.b32 %r{a}, %r{b}, %r{c}, %p1;",
    "mad.lo.s32": "mad.lo.s32 %r{a}, %r{b}, %r{c}, 5;",
    "shfl.sync.bfly.b32": "shfl.sync.bfly.b32 %r{a}, %r{b}, 1, 31, -1;",
}


def kernel_of(lines: str) -> ptx.Kernel:
    return next(iter(ptx.parse(f"{_HEADER}{lines}\nret;\n}}\n").kernels.values()))


def best(repeat: int, function) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def instruction_ns(pattern: str) -> float:
    """Time of one warp instruction in a loop of a thousand."""
    body = "mov.b32 %r50, 0;\nL:\n"
    for i in range(1000):
        body += pattern.format(a=i % 16, b=(7 * i + 1) % 16, c=(5 * i + 2) % 16) + "\n"
    body += "add.s32 %r50, %r50, 1;\nsetp.lt.s32 %p2, %r50, 20;\n@%p2 bra L;"
    warp = jit.build(kernel_of(body)).warp()

    def run() -> None:
        warp.start()
        warp.run()

    return best(9, run) / warp.ctx.count * 1e9


def call_us() -> float:
    """Time of one call into native code and back for a handled instruction."""
    kernel = kernel_of("mov.b32 %r1, 1;\n" * 2000)
    warp = jit.build(kernel, handled=range(2000)).warp()

    def run() -> None:
        warp.start()
        while warp.run() >> 60 == jit.KIND_STOP:
            pass

    return best(5, run) / 2000 * 1e6


def library_seconds() -> dict[str, float]:
    """Start of a process that needs every pack: with an empty cache, then with a full one."""
    code = (
        "import time; import cutlass; from fa_cute.sim.jit.library import library;"
        "from fa_cute.sim.jit.packs import PACKS; start = time.process_time();"
        "library().get([k for p in PACKS.values() for k in p]); print(time.process_time() - start)"
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"FA_CUTE_CACHE_DIR": folder}
        for name in ("empty cache", "full cache"):
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            found[name] = float(done.stdout.split()[-1])
    return found


def encoding(text: str) -> dict[str, float]:
    start = time.process_time()
    kernel = next(iter(ptx.parse(text).kernels.values()))
    parsed = time.process_time()
    compacted = jit.compact(kernel)
    renamed = time.process_time()
    handled = [i for i, ins in enumerate(compacted.instrs) if not jit.supports(ins)]
    jit.build(compacted, handled, dict.fromkeys(kernel.shared, 1024))
    built = time.process_time()
    return {
        "instructions": len(kernel.instrs),
        "handled by Python": len(handled),
        "rows before": kernel.n32 + 2 * kernel.n64,
        "rows after": compacted.n32 + 2 * compacted.n64,
        "parse, CPU ms": (parsed - start) * 1e3,
        "compact, CPU ms": (renamed - parsed) * 1e3,
        "encode, CPU ms": (built - renamed) * 1e3,
    }


def synthetic() -> str:
    lines = []
    for i in range(5000):
        pattern = list(INSTRUCTIONS.values())[i % len(INSTRUCTIONS)]
        lines.append(pattern.format(a=i % 60, b=(7 * i + 1) % 60, c=(5 * i + 2) % 60))
    return _HEADER + "\n".join(lines) + "\nret;\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ptx", type=Path, help="a PTX file to encode")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    figures: dict = {"library, CPU s": library_seconds()}
    library().get([key for pack in PACKS.values() for key in pack])
    figures["kernel"] = encoding(options.ptx.read_text() if options.ptx else synthetic())
    figures["ns per warp instruction"] = {n: instruction_ns(p) for n, p in INSTRUCTIONS.items()}
    figures["us per call"] = call_us()
    for name, value in figures.items():
        if isinstance(value, dict):
            print(name)
            for key, number in value.items():
                print(f"  {key:24s} {number:10.3f}")
        else:
            print(f"{name:26s} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
