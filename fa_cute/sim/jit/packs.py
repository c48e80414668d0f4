"""Forms that are compiled together, so that one load serves most kernels.

A form that no pack has costs a compilation of its own (about 20 ms) the first time that a kernel
uses it; a pack costs a few milliseconds per form once per machine.
"""

from __future__ import annotations


def _forms(text: str) -> list[str]:
    """`setp.{lt,gt}.{s32,u32}/4` and its kin, spelled out."""
    forms: list[str] = []
    for word in text.split():
        spelled = [""]
        for index, piece in enumerate(word.replace("}", "{").split("{")):
            options = piece.split(",") if index % 2 else [piece]  # odd pieces were in braces
            spelled = [head + option for head in spelled for option in options]
        forms += spelled
    return forms


_FLOAT = """
{add,sub,mul}.f32 {add,sub,mul}.rn.f32 {add,sub,mul}.rn.f32x2 {add,mul}.f32x2 add.rm.f32x2
{add,sub,mul}.ftz.f32 fma.rn.{f32,f32x2,f32.bf16,ftz.f32} neg.f32 abs.f32 div.rn.f32
{max,min}.{f32,NaN.f32}/3 {max,min}.f32/4 ex2.approx.{ftz.f32,f32} lg2.approx.{ftz.f32,f32}
rcp.approx.ftz.f32 rcp.rn.f32 rsqrt.approx.ftz.f32 tanh.approx.f32
{add,sub,mul}.{bf16x2,f16x2} fma.rn.{bf16x2,f16x2} max.{bf16x2,f16x2}/3
cvt.f32.{bf16,f16} cvt.rn.{bf16,f16,bf16x2,f16x2}.f32 cvt.rn.f32.{s32,u32} cvt.rzi.s32.f32
cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32
"""

_INTEGER = """
{add,sub}.{s16,s32,s64} neg.{s16,s32} {mul,mad}.lo.{s16,s32,s64} mul.hi.{s32,u32,u16}
mul.wide.{s16,s32,u16,u32} mad.wide.{s32,u32} {div,rem}.{s32,u32} {min,max}.{s32,u32}/3
{min,max}.relu.s32/3 {and,or,xor}.{b16,b32,b64,pred} not.{b32,pred} shl.{b16,b32,b64}
shr.{s16,s32,s64,u16,u32,u64} prmt.b32 lop3.b32 popc.b32 clz.b32 shf.l.wrap.b32 bfe.u32
cvt.{s16,s32}.s8 cvt.s32.s16 cvt.s64.s32 cvt.s8.s32 cvt.u16.{u32,u8} cvt.u32.{u16,u64,u8}
cvt.u64.{u16,u32}
"""

_MOVE = """
mov.{b16,b32,b64,pred}/2 mov.b32/3;16,16,32 mov.b32/3;32,16,16 mov.b64/3;32,32,64 mov.b64/3;64,32,0
mov.b64/3;64,32,32 mov.b64/3;64,0,32 mov.b64/3;64,0,0 mov.b64/3;0,32,64 mov.b64/3;32,0,64
selp.{b16,b32,b64}
setp.{eq,ne}.{b16,b32,b64}/4 setp.{lt,le,gt,ge}.{s32,u32,s64,f32}/4 setp.lt.s16/4
setp.{eq,ne,neu}.f32/4 setp.{lt,eq,ne}.and.{s32,b32}/5
cvta.{param,shared,global,to.global,to.shared,to.shared::cluster}.u64 mapa.shared::cluster.u32
fence prefetch griddepcontrol
"""

_MEMORY = """
ld.param.{b8;16,0|b32;32,0|b64;64,0|v2.b8;16,16,0|v2.b32;32,32,0|v4.b32;32,32,32,32,0}
ld.param.v2.b64;64,64,0
ld.shared.{b16;16,32|b32;32,32|b64;64,32|v2.b32;32,32,32|v2.b64;64,64,32|v4.b32;32,32,32,32,32}
st.shared.{b16;32,32|b32;32,32|b64;32,64|v2.b32;32,32,32|v2.b64;32,64,64|v4.b32;32,32,32,32,32}
ld.global.{b16;16,64|b32;32,64|b64;64,64|v2.b32;32,32,64|v2.b64;64,64,64|v4.b32;32,32,32,32,64}
st.global.{b16;64,32|b32;64,32|b64;64,64|v2.b32;64,32,32|v2.b64;64,64,64|v4.b32;64,32,32,32,32}
"""

_WARP = """
elect.sync bar.warp.sync activemask.b32 shfl.sync.{bfly,idx,up,down}.b32
vote.sync.{ballot.b32,any.pred,all.pred} redux.sync.{add,max,min}.s32 redux.sync.or.b32
"""


_MATRIX = """
ldmatrix.sync.aligned.m8n8.{x4,x4.trans}.shared.b16;32,32,32,32,32
stmatrix.sync.aligned.m8n8.{x4,x4.trans}.shared.b16;32,32,32,32,32
mma.sync.aligned.m16n8k16.row.col.f32.{bf16.bf16,f16.f16}.f32
"""


def _alternatives(text: str) -> list[str]:
    """`ld.shared.{b32;32,32|b64;64,32}` spelled out."""
    forms: list[str] = []
    for word in text.split():
        head, brace, tail = word.partition("{")
        forms += [head + option for option in tail.rstrip("}").split("|")] if brace else [word]
    return forms


PACKS: dict[str, list[str]] = {
    "loop": ["bra", "bra.uni", "ret", "exit", "trap", "stop"],
    "float": _forms(_FLOAT),
    "integer": _forms(_INTEGER),
    "move": _forms(_MOVE),
    "memory": _alternatives(_MEMORY),
    "warp": _forms(_WARP),
    "matrix": _forms(_MATRIX),
}
