"""Whether other processes used the CPUs while something was measured. It judges load, never a result.

Time of the CPUs comes from /proc/stat, that of this process and all that descend from it (Ray's processes, peers, their
servers) from /proc/<pid>/stat. What is left over is other people's.
"""

import os
import time
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)  # of the line "cpu": user, nice, system, irq, softirq, steal
_FOREIGN_FRACTION = 0.05
_FOREIGN_S = 0.03  # what rounding to ticks makes of nothing
_QUIET_FRACTION = 0.08
_LOOK_S = 1.0


class Watch:
    """A ``with`` block; afterwards `foreign_s` says how long other processes used a CPU meanwhile."""

    foreign_s = 0.0
    wall_s = 0.0

    def __enter__(self) -> "Watch":
        self._started, self._foreign = time.monotonic(), _foreign_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wall_s = time.monotonic() - self._started
        self.foreign_s = max(0.0, _foreign_s() - self._foreign)

    @property
    def disturbed(self) -> bool:
        """Whether that was more than what rounding, and a machine that does nothing else, explain."""
        return self.foreign_s > _FOREIGN_FRACTION * self.wall_s + _FOREIGN_S


def wait_until_quiet(patience_s: float) -> bool:
    """Wait for a second in which others use next to nothing; False when there is none in time."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        with Watch() as watch:
            time.sleep(_LOOK_S)
        if watch.foreign_s <= _QUIET_FRACTION * watch.wall_s:
            return True
    return False


def _foreign_s() -> float:
    fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()
    return sum(int(fields[field]) for field in _BUSY_FIELDS) / _TICKS_PER_S - _own_s()


def _own_s() -> float:
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir(_PROC):
        if name.isdigit():
            try:
                text = (_PROC / name / "stat").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            fields = text[text.rindex(")") + 2 :].split()
            # Those that have ended count for the parent that waited for them.
            parents[int(name)], ticks[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours and pid not in ours}:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours) / _TICKS_PER_S
