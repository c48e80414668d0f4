"""The public functions: dispatch, the reference backend, support answers, determinism switches."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

import fa_cute
from fa_cute import api, can_use, dispatch, flash_attn_func, reference, supports, tune


def qkv(dtype=torch.bfloat16, head_dim=64, **kw):
    g = torch.Generator().manual_seed(3)
    shapes = ((2, 9, 4, head_dim), (2, 11, 2, head_dim), (2, 11, 2, head_dim))
    return [torch.randn(s, generator=g).to(dtype).requires_grad_(**kw) for s in shapes]


NO_GRAD = {"requires_grad": False}


@pytest.fixture
def no_backward(monkeypatch):
    """As on an architecture whose backward is not written yet."""
    monkeypatch.setattr(tune, "BACKWARD_KERNELS", {})


def test_signature():
    assert str(inspect.signature(flash_attn_func)) == (
        "(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "learnable_sink=None, deterministic=None, *, return_lse=False, backend='auto')"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_reference_backend(dtype):
    q, k, v = qkv(dtype, **NO_GRAD)
    out = flash_attn_func(q, k, v, causal=True, backend="reference")
    want, want_lse = reference.attention(q, k, v, causal=True, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, atol=max(eps, 1e-6), rtol=max(eps, 1e-6))
    assert out.dtype == dtype
    out2, lse = flash_attn_func(q, k, v, causal=True, backend="reference", return_lse=True)
    assert torch.equal(out, out2) and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def test_reference_backend_differentiates_everything():
    q, k, v = qkv(torch.float64, head_dim=7)
    sink = torch.zeros(4, dtype=torch.float32, requires_grad=True)
    out = flash_attn_func(
        q, k, v, 0.5, True, (3, 0), softcap=5.0, learnable_sink=sink, backend="reference"
    )
    out.sum().backward()
    for t in (q, k, v, sink):
        assert t.grad is not None and t.grad.isfinite().all() and t.grad.abs().max() > 0


def test_environment_chooses_the_backend(monkeypatch):
    q, k, v = qkv(torch.float32, **NO_GRAD)
    monkeypatch.setenv("FA_CUTE_BACKEND", "reference")
    assert flash_attn_func(q, k, v).dtype == torch.float32


def test_support_names_arch_and_kernel(monkeypatch):
    answer = can_use(*qkv(**NO_GRAD))
    assert answer and answer.ok and answer.reasons == ()
    assert (answer.arch, answer.kernel) == ("sm_100a", "FwdSm100")
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_103a")
    assert can_use(*qkv(**NO_GRAD)).arch == "sm_103a"


def test_support_gives_every_reason(no_backward, monkeypatch):
    monkeypatch.setattr(tune, "FORWARD_DOES", {"sm100": ()})
    q, k, v = qkv(torch.float32, head_dim=7)
    answer = can_use(q, k, v, softcap=3.0, window_size=(4, 4))
    text = "\n".join(answer.reasons)
    for word in ("fp32", "head_dim 7", "softcap", "window_size", "requires_grad", "16 bytes"):
        assert word in text, word


def test_the_error_says_what_support_says():
    q, k, v = qkv(torch.float32, **NO_GRAD)
    with pytest.raises(fa_cute.UnsupportedError) as caught:
        flash_attn_func(q, k, v, softcap=3.0)
    for reason in can_use(q, k, v, softcap=3.0).reasons:
        assert reason in str(caught.value)
    assert "implemented on sm_100a" in str(caught.value)


def test_supports_agrees_with_the_table():
    for row in tune.FWD:
        for arch in row.arches:
            for causal in (True, False):
                asked = supports(
                    arch=arch, head_dim=row.head_dim, head_dim_v=row.head_dim_v, causal=causal
                )
                assert asked or row.causal not in (None, causal), (row, asked.reasons)
    assert not supports(arch="sm_80")
    assert not supports(head_dim=72)
    assert supports(backward=True, deterministic=True)
    assert supports(dtype=torch.float16, qhead_per_kvhead=8)
    with pytest.raises(fa_cute.ArgumentError):
        supports(dtype="int4")
    with pytest.raises(fa_cute.ArgumentError):
        supports(head_dim=-1)
    with pytest.raises(fa_cute.UnsupportedError, match="sm_42"):
        supports(arch="sm_42")


@pytest.mark.parametrize("name", ["FA_CUTE_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC"])
def test_determinism_follows_the_environment(name, monkeypatch):
    monkeypatch.delenv("FA_CUTE_DETERMINISTIC", raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    assert not api.wants_determinism(None)
    monkeypatch.setenv(name, "1")
    assert api.wants_determinism(None)
    assert not api.wants_determinism(False)


def test_determinism_follows_torch():
    torch.use_deterministic_algorithms(True)
    try:
        assert api.wants_determinism(None)
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_grad_needs_no_backward(no_backward):
    assert not supports(backward=True) and "backward" in supports(backward=True).reasons[0]
    with torch.no_grad():
        assert can_use(*qkv(), backend="auto")
    assert not can_use(*qkv())


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light():
    """No DSL, no TVM-FFI; and little time beyond torch's own import."""
    out = run_python(
        "import sys, time, torch\n"
        "start = time.process_time()\n"
        "import fa_cute; fa_cute.flash_attn_func\n"
        "print(time.process_time() - start)\n"
        "assert not {'cutlass', 'tvm_ffi', 'matplotlib'} & set(sys.modules)\n"
    )
    assert float(out) < 0.3


def test_works_without_the_dsl():
    out = run_python(
        "import sys\n"
        "sys.modules['cutlass'] = sys.modules['tvm_ffi'] = None\n"
        "import torch, fa_cute\n"
        "x = torch.ones(1, 3, 1, 64, dtype=torch.bfloat16)\n"
        "print(fa_cute.flash_attn_func(x, x, x, backend='reference').sum().item())\n"
        "from fa_cute import cli\n"
        "assert cli.main(['support']) == 0 and cli.main(['plan', 'sm100', 'fwd']) == 0\n"
        "try:\n"
        "    fa_cute.flash_attn_func(x, x, x)\n"
        "except fa_cute.CompileError as error:\n"
        "    print(error)\n"
    )
    assert out.startswith("192.0\n") and "pip install" in out


def test_public_names():
    for name in fa_cute.__all__:
        assert getattr(fa_cute, name) is not None
    with pytest.raises(AttributeError):
        fa_cute.nothing  # noqa: B018
    assert math.isclose(float(fa_cute.__version__.rsplit(".", 1)[0]), 0.1)


@dataclass
class Seen:
    """What `repeated` watches."""

    validated: int = 0
    ran: list = field(default_factory=list)  # the problem of each launch


@pytest.fixture
def repeated(monkeypatch):
    """Remembers calls on CPU tensors as it does on CUDA tensors; launches nothing."""
    seen = Seen()
    check = dispatch.AttnProblem.of.__func__

    def of(cls, *args, **kw):
        seen.validated += 1
        return check(cls, *args, **kw)

    monkeypatch.setattr(dispatch, "_REPEATED", "is_cpu")
    monkeypatch.setattr(dispatch, "_seen", dispatch.Seen())
    monkeypatch.setattr(dispatch.AttnProblem, "of", classmethod(of))
    monkeypatch.setattr(dispatch.Call, "forward", lambda self, *_: seen.ran.append(self.problem))
    return seen


def test_a_repeated_call_is_validated_once(repeated):
    q, k, v = qkv(**NO_GRAD)
    for causal in (True, False, True, False):
        flash_attn_func(q, k, v, causal=causal)
        assert repeated.ran[-1].causal == causal
    assert repeated.validated == 2
    flash_attn_func(q[:, :3], k, v)
    flash_attn_func(q, k, v, 0.5)
    flash_attn_func(q.half(), k.half(), v.half())
    flash_attn_func(q.transpose(0, 0).clone(), k, v)
    assert repeated.validated == 5


@pytest.mark.parametrize(
    "options",
    [
        {"causal": 1},
        {"softcap": False},
        {"softmax_scale": True},
        {"window_size": [-1, -1, -1]},
        {"deterministic": 0},
        {"return_lse": 1},
        {"backend": "nonsense"},
    ],
    ids=str,
)
def test_what_is_equal_to_a_remembered_call_is_still_checked(options, repeated):
    q, k, v = qkv(**NO_GRAD)
    for causal in (True, False):
        flash_attn_func(q, k, v, causal=causal)
        flash_attn_func(q, k, v, 1.0, causal, deterministic=False)
    with pytest.raises(fa_cute.ArgumentError):
        flash_attn_func(q, k, v, **options)


def test_a_remembered_call_follows_the_environment(repeated, monkeypatch):
    q, k, v = qkv(**NO_GRAD)
    flash_attn_func(q, k, v)
    monkeypatch.setenv("FA_CUTE_BACKEND", "nonsense")
    with pytest.raises(fa_cute.ArgumentError, match="FA_CUTE_BACKEND"):
        flash_attn_func(q, k, v)
    os.environ["FA_CUTE_BACKEND"] = "cuda"
    with pytest.raises(fa_cute.ArgumentError, match="needs CUDA tensors"):
        flash_attn_func(q, k, v)
    del os.environ["FA_CUTE_BACKEND"]
    flash_attn_func(q, k, v)
    assert len(repeated.ran) == 2


def test_a_remembered_call_still_checks_alignment_and_gradients(repeated, no_backward):
    q, k, v = qkv(**NO_GRAD)
    flash_attn_func(q, k, v)
    flat = torch.zeros(q.numel() + 8, dtype=q.dtype)
    with pytest.raises(fa_cute.ArgumentError, match="do not start"):
        flash_attn_func(flat[1 : q.numel() + 1].view(q.shape), k, v)
    with pytest.raises(fa_cute.UnsupportedError, match="requires_grad"):
        flash_attn_func(q.requires_grad_(), k, v)
