"""Which warps do what, and with how many registers."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError

WARP_THREADS = 32
WARPGROUP_WARPS = 4
# PTX ISA, setmaxnreg: a multiple of 8 in [24, 256], executed by all warps of a warpgroup with the
# same value.
REGS_MIN, REGS_MAX, REGS_STEP = 24, 256, 8
SM_REGISTERS = 65536
CTA_WARPS_MAX = 32


@dataclass(frozen=True)
class Role:
    """Warps ``[start, stop)`` of the CTA run one body with ``regs`` registers a thread.

    Roles may share a warpgroup only with equal ``regs``: ``setmaxnreg`` acts on whole warpgroups. A
    role of several ``teams`` splits its warps evenly; team t alone serves slot t of the role's
    edges.
    """

    name: str
    start: int
    stop: int
    regs: int
    teams: int = 1

    @property
    def warps(self) -> range:
        return range(self.start, self.stop)

    @property
    def threads(self) -> int:
        return WARP_THREADS * len(self.warps)


@dataclass(frozen=True)
class WarpPlan:
    """All warps of a CTA; every thread starts with ``launch_regs``, before roles change it."""

    roles: tuple[Role, ...]
    launch_regs: int
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        self._check_ranges()
        for what, regs in [(f"role {r.name!r}", r.regs) for r in self.roles] + [
            ("launch_regs", self.launch_regs)
        ]:
            if not REGS_MIN <= regs <= REGS_MAX or regs % REGS_STEP:
                raise PlanError(
                    f"{what}: {regs} registers; a multiple of {REGS_STEP} in [{REGS_MIN}, "
                    f"{REGS_MAX}]"
                )
        if self.changes_regs:
            self._check_warpgroups()
        launched = self.launch_regs * self.threads
        if self.budget > launched:
            raise PlanError(
                f"register budget {self.budget} of the roles exceeds {launched} at launch "
                f"({self.threads} threads x {self.launch_regs})"
            )
        if launched * self.ctas_per_sm > SM_REGISTERS:
            raise PlanError(
                f"register budget {launched * self.ctas_per_sm} exceeds {SM_REGISTERS} per SM"
            )

    def _check_ranges(self) -> None:
        names = [r.name for r in self.roles]
        if not names:
            raise PlanError("a warp plan needs at least one role")
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise PlanError(f"roles {twice} are declared twice")
        at = 0
        for role in self.roles:
            if role.start != at or role.stop <= role.start:
                raise PlanError(
                    f"role {role.name!r} has warps [{role.start}, {role.stop}); "
                    f"roles are contiguous and not empty: it starts at warp {at}"
                )
            if role.teams < 1 or len(role.warps) % role.teams:
                raise PlanError(
                    f"role {role.name!r}: {len(role.warps)} warps in {role.teams} teams; equal "
                    "teams"
                )
            at = role.stop
        if at > CTA_WARPS_MAX:
            raise PlanError(f"{at} warps; a CTA has at most {CTA_WARPS_MAX}")

    def _check_warpgroups(self) -> None:
        """``setmaxnreg`` needs all warps of a complete warpgroup, with one value."""
        if self.num_warps % WARPGROUP_WARPS:
            raise PlanError(
                f"{self.num_warps} warps leave warpgroup {self.num_warps // WARPGROUP_WARPS} "
                "incomplete and registers "
                f"change; add {-self.num_warps % WARPGROUP_WARPS} idle warps"
            )
        for group in range(self.num_warps // WARPGROUP_WARPS):
            first = group * WARPGROUP_WARPS
            budgets = sorted({self.of_warp(w).regs for w in range(first, first + WARPGROUP_WARPS)})
            if len(budgets) > 1:
                raise PlanError(
                    f"warpgroup {group} mixes register budgets {budgets}; setmaxnreg is per "
                    "warpgroup"
                )

    def __getitem__(self, name: str) -> Role:
        for role in self.roles:
            if role.name == name:
                return role
        raise PlanError(f"no role {name!r}; roles: {[r.name for r in self.roles]}")

    def of_warp(self, warp: int) -> Role:
        """The role of a warp index."""
        for role in self.roles:
            if warp in role.warps:
                return role
        raise PlanError(f"no role has warp {warp}; warps: [0, {self.num_warps})")

    @property
    def num_warps(self) -> int:
        return self.roles[-1].stop

    @property
    def threads(self) -> int:
        return WARP_THREADS * self.num_warps

    @property
    def budget(self) -> int:
        """Registers of the CTA once every role has its own."""
        return sum(r.threads * r.regs for r in self.roles)

    @property
    def changes_regs(self) -> bool:
        """Whether some role asks for another number than the launch gave."""
        return any(r.regs != self.launch_regs for r in self.roles)
