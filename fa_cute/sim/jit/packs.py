"""Forms that are compiled together, so that one load serves most kernels."""

from __future__ import annotations

_ALU = """
add.f32
add.rm.f32x2
add.rn.f32x2
add.s16
add.s32
add.s64
add.u32
and.b16
and.b32
and.pred
cvt.f32.bf16
cvt.rn.bf16x2.f32
cvt.s16.s8
cvt.s32.s16
cvt.s32.s8
cvt.s64.s32
cvt.u16.u32
cvt.u32.u16
cvt.u32.u64
cvt.u64.u32
cvta.param.u64
cvta.shared.u64
cvta.to.global.u64
cvta.to.shared::cluster.u64
ex2.approx.ftz.f32
fence
fma.rn.f32
fma.rn.f32.bf16
fma.rn.f32x2
griddepcontrol
lg2.approx.ftz.f32
mad.lo.s32
mad.lo.s64
mapa.shared::cluster.u32
max.f32/3
max.f32/4
max.s32/3
min.s32/3
mov.b16/2
mov.b32/2
mov.b32/3;16,16,32
mov.b64/2
mov.b64/3;32,32,64
mov.b64/3;64,32,0
mov.b64/3;64,32,32
mov.pred/2
mov.u32/2
mul.f32
mul.f32x2
mul.hi.u32
mul.lo.s32
mul.lo.s64
mul.rn.f32x2
mul.wide.s16
mul.wide.s32
mul.wide.u16
mul.wide.u32
neg.f32
neg.s16
neg.s32
not.b32
not.pred
or.b32
or.b64
prefetch
rcp.approx.ftz.f32
selp.b16
selp.b32
selp.f32
setp.eq.b32/4
setp.eq.f32/4
setp.ge.f32/4
setp.ge.s32/4
setp.gt.s32/4
setp.gt.u32/4
setp.le.s32/4
setp.lt.f32/4
setp.lt.s32/4
setp.lt.u32/4
setp.ne.b16/4
setp.ne.b32/4
setp.ne.f32/4
setp.neu.f32/4
shl.b16
shl.b32
shl.b64
shr.s16
shr.s32
shr.u16
shr.u32
sub.f32
sub.rn.f32x2
sub.s16
sub.s32
xor.b32
""".split()

_MEMORY = """
ld.global.b32;32,64
ld.global.v2.b64;64,64,64
ld.global.v4.b32;32,32,32,32,64
ld.param.b32;32,0
ld.param.b64;64,0
ld.param.v2.b32;32,32,0
ld.param.v2.b8;16,16,0
ld.shared.b32;32,32
ld.shared.v2.b32;32,32,32
ld.shared.v2.b64;64,64,32
ld.shared.v4.b32;32,32,32,32,32
st.global.b32;64,32
st.global.v2.b64;64,64,64
st.global.v4.b32;64,0,0,0,0
st.global.v4.b32;64,32,32,32,32
st.shared.b32;32,32
st.shared.v4.b32;32,32,32,32,32
""".split()

_WARP = """
bar.warp.sync
elect.sync
shfl.sync.bfly.b32
shfl.sync.idx.b32
vote.sync.ballot.b32
""".split()

PACKS: dict[str, list[str]] = {
    "loop": ["bra", "bra.uni", "ret", "exit", "stop"],
    "alu": _ALU,
    "memory": _MEMORY,
    "warp": _WARP,
}
