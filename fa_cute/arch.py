"""Hardware limits of each architecture: the one place that knows them.

Sources: CUDA C++ Programming Guide, table of compute capabilities; PTX ISA (tensor memory, named
barriers, clusters).
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnsupportedError

KIB = 1024


@dataclass(frozen=True)
class Arch:
    """One compilation target and the limits that a plan is checked against."""

    name: str  # what the compiler calls it: "sm_100a"
    family: str  # which kernels it runs: "sm100"
    capability: tuple[int, int]  # as the driver reports it
    smem_bytes: int  # dynamic shared memory that one CTA may opt in to
    smem_bytes_per_sm: int
    num_sms: int  # of A100, H100 SXM, B200, B300: a default, the device knows better
    l2_bytes: int  # of the same part
    tmem_cols: int = 0  # 32-bit columns of 128 lanes
    max_cluster: int = 1  # CTAs of a portable cluster
    regs_per_sm: int = 64 * KIB  # also the limit of one CTA
    max_regs_per_thread: int = 255
    max_threads: int = 1024  # of one CTA
    max_threads_per_sm: int = 2048
    named_barriers: int = 16  # barrier 0 is __syncthreads
    warp_size: int = 32
    has_tma: bool = True
    has_wgmma: bool = False
    has_tcgen05: bool = False
    has_setmaxnreg: bool = True
    has_clc: bool = False  # cluster launch control

    @property
    def warps_per_warpgroup(self) -> int:
        """Warps that execute wgmma, setmaxnreg and tensor-memory accesses together."""
        return 4

    def __str__(self) -> str:
        return self.name


ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        Arch(
            name="sm_80",
            family="sm80",
            capability=(8, 0),
            smem_bytes=163 * KIB,
            smem_bytes_per_sm=164 * KIB,
            num_sms=108,
            l2_bytes=40 * KIB * KIB,
            has_tma=False,
            has_setmaxnreg=False,
        ),
        Arch(
            name="sm_90a",
            family="sm90",
            capability=(9, 0),
            smem_bytes=227 * KIB,
            smem_bytes_per_sm=228 * KIB,
            num_sms=132,
            l2_bytes=50 * KIB * KIB,
            max_cluster=8,
            has_wgmma=True,
        ),
        Arch(
            name="sm_100a",
            family="sm100",
            capability=(10, 0),
            smem_bytes=227 * KIB,
            smem_bytes_per_sm=228 * KIB,
            num_sms=148,
            l2_bytes=126 * KIB * KIB,
            tmem_cols=512,
            max_cluster=8,
            has_tcgen05=True,
            has_clc=True,
        ),
        Arch(
            name="sm_103a",
            family="sm100",
            capability=(10, 3),
            smem_bytes=227 * KIB,
            smem_bytes_per_sm=228 * KIB,
            num_sms=148,
            l2_bytes=126 * KIB * KIB,
            tmem_cols=512,
            max_cluster=8,
            has_tcgen05=True,
            has_clc=True,
        ),
    )
}

DEFAULT = "sm_100a"  # what CPU tensors are simulated on unless FA_CUTE_ARCH says otherwise


def get(name: str) -> Arch:
    """The architecture called "sm_100a", "sm100a" or "sm100" (the first of its family)."""
    key = str(name).lower().replace("_", "")
    for arch in ARCHS.values():
        if key in (arch.name.replace("_", ""), arch.family):
            return arch
    raise UnsupportedError(f"unknown architecture {name!r}; known: {', '.join(ARCHS)}")


def of_capability(major: int, minor: int) -> Arch:
    """The architecture whose kernels a device of this compute capability runs."""
    for arch in ARCHS.values():
        if arch.capability == (major, minor):
            return arch
    known = ", ".join(f"{a.capability[0]}.{a.capability[1]} ({a.name})" for a in ARCHS.values())
    raise UnsupportedError(
        f"compute capability {major}.{minor} has no kernels here; known: {known}; "
        "move the tensors to the CPU for the simulator, or use backend='reference'"
    )
