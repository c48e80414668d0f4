"""The operators on a real GPU: `python -m tests.gpu.front`, results to `$OUT/front.jsonl`.

Not collected by pytest. opcheck on CUDA tensors; torch.compile against eager, bit for bit; replays
of a CUDA graph; side streams and tensors that cross them; another current device; the refusal to
compile during a capture; a second process that loads from disk; sequences of different lengths
without a synchronisation, compiled once, in a graph whose lengths change; host time of a warm call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch

from fa_cute import CompileDuringCaptureError, compile, flash_attn_func, flash_attn_varlen_func

OPS = torch.ops.fa_cute
REPLAYS = 100


def inputs(seqlen=512, batch=2, seed=0, grad=True):
    g = torch.Generator(device="cuda").manual_seed(seed)
    shapes = [(batch, seqlen, h, 128) for h in (4, 2, 2)]
    made = [torch.randn(s, device="cuda", generator=g).bfloat16() for s in shapes]
    return [t.requires_grad_(grad) for t in made]


def both(q, k, v):
    return flash_attn_func(q, k, v, causal=True, return_lse=True, deterministic=True)


def gradients(fn, q, k, v):
    out, lse = fn(q, k, v)
    return out, lse, *torch.autograd.grad((out, lse), (q, k, v), (out.detach(), lse.detach()))


def same(some, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def check_opcheck():
    q, k, v = inputs(64, 1)
    options = {"causal": True, "deterministic": True}
    torch.library.opcheck(OPS.fwd, (q, k, v), options)
    out, lse = (t.detach() for t in both(q, k, v))
    given = (out, q.detach(), k.detach(), v.detach(), out, lse)
    torch.library.opcheck(OPS.bwd, given, options)


def check_compile():
    for backend in ("aot_eager", "inductor"):
        compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=backend)
        for seqlen in (256, 384):
            tensors = inputs(seqlen)
            assert same(gradients(compiled, *tensors), gradients(both, *tensors)), backend


def check_graph():
    q, k, v = inputs()
    # Detached: a graph kept alive from another stream would tie the capture to that stream.
    want = [t.detach() for t in gradients(both, q, k, v)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(both, q, k, v)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(both, q, k, v)
    for replay in range(REPLAYS):
        for t in got:
            t.detach().fill_(float("nan"))
        graph.replay()
        assert same(got, want), replay


def check_capture_refuses():
    compile.clear()
    q, k, v = inputs(grad=False)
    both(q, k, v)
    tensors = [t.half() for t in (q, k, v)]
    both(*tensors)
    compile.clear()
    dispatch = sys.modules["fa_cute.dispatch"]
    dispatch._seen.clear()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            both(*tensors)
    except CompileDuringCaptureError:
        return
    finally:
        torch.cuda.synchronize()
    raise AssertionError("compiled during a capture")


def check_streams():
    want = gradients(both, *inputs())
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 8:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)  # what follows on another stream would overtake
            tensors = inputs()
            results.append((stream, gradients(both, *tensors)))
    for stream, got in results:
        torch.cuda.current_stream().wait_stream(stream)
        for t in got:
            t.record_stream(torch.cuda.current_stream())
        assert same(got, want)


def check_devices():
    if torch.cuda.device_count() < 2:
        return "one device"
    tensors = inputs()
    moved = [t.detach().to("cuda:1").requires_grad_() for t in tensors]
    got = gradients(both, *moved)  # the current device is 0
    assert same([t.to("cuda:0") for t in got], gradients(both, *tensors))
    return None


def check_second_process():
    program = (
        "from fa_cute import compile\ncompile.build = None\n"
        "from tests.gpu import front\nimport torch\n"
        "out = front.gradients(front.both, *front.inputs())\n"
        "print(sum(t.double().sum().item() for t in out))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = sum(t.double().sum().item() for t in gradients(both, *inputs()))
    assert float(done.stdout) == here


def packed(lengths, seed=0):
    """cu_seqlens, q, k, v."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    return ends, *(t[0].detach().requires_grad_() for t in inputs(sum(lengths), 1, seed))


def sequences(cu, most=None):
    """A function of q, k, v."""

    def attend(q, k, v):
        options = {"causal": True, "return_lse": True, "deterministic": True}
        return flash_attn_varlen_func(q, k, v, cu, cu, most, most, **options)

    return attend


def check_varlen_operators():
    cu, q, k, v = packed((100, 0, 300))
    torch.library.opcheck(OPS.varlen_fwd, (q, k, v, cu, cu), {"causal": True})
    compiled = torch.compile(sequences(cu), fullgraph=True, dynamic=True)
    assert same(gradients(compiled, q, k, v), gradients(sequences(cu), q, k, v))


def check_varlen_compiles_once_and_never_waits():
    cu, *tensors = packed((100, 0, 300))
    gradients(sequences(cu), *tensors)
    torch.cuda.synchronize()
    mode = compile.jit_monitor("error")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lengths, most in (((100, 0, 300), 300), ((64,), None), ((7, 900, 1, 1), "tensor")):
            torch.cuda.set_sync_debug_mode("default")
            cu, *tensors = packed(lengths)
            most = torch.tensor(900, device="cuda") if most == "tensor" else most
            torch.cuda.set_sync_debug_mode("error")
            gradients(sequences(cu, most), *tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        compile.jit_monitor(mode)


def check_varlen_graph():
    """The lengths are inputs of the graph: other ones in the same tensor, other results."""
    cu, q, k, v = packed((200, 312))
    gradients(sequences(cu), q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(sequences(cu), q, k, v)
    for cut in (0, 1, 129, 512):
        cu.copy_(torch.tensor([0, cut, 512], dtype=torch.int32))
        graph.replay()
        assert same(got, gradients(sequences(cu.clone()), q, k, v)), cut


def host_us(fn, calls=200, rounds=20) -> float:
    """The least time of a call on the host; the queue is drained between rounds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def check_host_time():
    q, k, v = inputs(64, 1)
    grad = host_us(lambda: flash_attn_func(q, k, v, causal=True))
    out = flash_attn_func(q, k, v, causal=True)
    dout = torch.ones_like(out)
    back = host_us(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    operator = host_us(lambda: OPS.fwd(q, k, v, None, True))
    with torch.no_grad():
        plain = host_us(lambda: flash_attn_func(q, k, v, causal=True))
    found = {"without grad": plain, "with grad": grad, "operator, grad": operator, "backward": back}
    return {name: round(us, 1) for name, us in found.items()}


def check_varlen_host_time():
    cu, *tensors = packed((30, 34))
    attend = sequences(cu)
    grad = host_us(lambda: attend(*tensors))
    with torch.no_grad():
        plain = host_us(lambda: attend(*tensors))
    return {"without grad": round(plain, 1), "with grad": round(grad, 1)}


CHECKS = (
    check_opcheck,
    check_compile,
    check_graph,
    check_capture_refuses,
    check_streams,
    check_devices,
    check_second_process,
    check_varlen_operators,
    check_varlen_compiles_once_and_never_waits,
    check_varlen_graph,
    check_host_time,
    check_varlen_host_time,
)


def main() -> int:
    bad = 0
    with open(os.path.join(os.environ.get("OUT", "."), "front.jsonl"), "w") as file:
        for check in CHECKS:
            line = {"check": check.__name__.removeprefix("check_"), "ok": True}
            try:
                found = check()
                if found is not None:
                    line["found"] = found
            except Exception as error:  # the others still have something to say
                line |= {"ok": False, "found": f"{type(error).__name__}: {error}"[:2000]}
                bad += 1
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
