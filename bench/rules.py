"""Rules: how a scheduler decides in one run of a bench, on an engine and in the simulator alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduler.admission import ADMISSION
from scheduler.buckets import BucketGrid
from scheduler.config import SchedulerConfig
from scheduler.core import Scheduler
from scheduler.lengths import LengthModel
from scheduler.preemption import PreemptionCosts
from scheduler.stats import Stats

BOUND = 0.1  # the default of EngineConfig.admission_bound


@dataclass(frozen=True, slots=True)
class Rules:
    """admission: as in EngineConfig. lengths: "profiled" or "oracle". Who would wait for more than
    max_queue_wait (seconds), or behind more than max_waiting, is refused; None: nobody is.
    host_pages False: preemption always recomputes."""

    admission: str = "statistical"
    lengths: str = "profiled"
    max_queue_wait: float | None = None
    max_waiting: int | None = None
    host_pages: bool = True

    def scheduler(
        self,
        limits: SchedulerConfig,
        grid: BucketGrid,
        costs: PreemptionCosts,
        models: Mapping[str, LengthModel],
        stats: Stats | None = None,
    ) -> Scheduler:
        """A new scheduler within these limits. models: those that `lengths` may name; they outlive
        a scheduler, with what they have learnt."""
        lengths = models[self.lengths]
        limits = replace(
            limits,
            max_queue_wait=self.max_queue_wait,
            max_waiting=self.max_waiting,
            num_host_pages=limits.num_host_pages if self.host_pages else 0,
        )
        return Scheduler(
            limits,
            grid,
            admission=ADMISSION[self.admission](lengths, BOUND),
            lengths=lengths,
            costs=costs,
            stats=stats,
        )
