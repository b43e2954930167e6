"""RunningRows: the sequences that have a slot, and their pages. Every page that a row takes or
leaves goes through here, and so does what is set aside for rows that may not be preempted again."""

from __future__ import annotations

from bisect import insort
from collections import Counter

import numpy as np

from scheduler.admission import AdmissionPolicy, AdmissionRound, Candidate, RunningSet
from scheduler.cache import KVCache, Match
from scheduler.config import SchedulerConfig
from scheduler.lengths import Rows
from scheduler.pages import pages_for
from scheduler.preemption import PreemptionCosts, is_protected
from scheduler.request import Sequence, Status
from scheduler.slots import SlotTable


def slots_of(sequences: list[Sequence]) -> np.ndarray:
    """int32[n]"""
    return np.fromiter((s.slot for s in sequences), np.int32, len(sequences))


class RunningRows:
    def __init__(self, config: SchedulerConfig, costs: PreemptionCosts):
        self._page_size = config.page_size
        self.cache = KVCache(config, costs)
        self.slots = SlotTable(config.max_rows, config.max_pages_per_sequence, config.page_size)
        self.sequences: list[Sequence] = []  # in order of arrival
        # pages that protected rows may still take, and nobody else
        self.promised = 0
        self._all_slots: np.ndarray | None = None  # of `sequences`, while they stay the same

    @property
    def all_slots(self) -> np.ndarray:
        """int32[n]: the slots of `sequences`, in their order."""
        if self._all_slots is None:
            self._all_slots = slots_of(self.sequences)
        return self._all_slots

    def need(self, sequence: Sequence, match: Match) -> int:
        """Pages that a waiting sequence takes out of the available ones when it starts: for its
        present tokens and the next, or for all that it may ever have if it is protected."""
        tokens = _most(sequence) if is_protected(sequence) else sequence.num_tokens + 1
        return pages_for(tokens, self._page_size) - match.num_device + match.num_idle

    def room(self, slots: np.ndarray) -> int:
        """Available pages without those promised, and without what the rows in these slots still
        lack for the tokens that they have and the next: who starts on less is preempted in the
        next step."""
        table = self.slots
        tokens = np.minimum(table.target[slots] + 1, table.limit[slots])
        lack = np.maximum(-(-tokens // self._page_size) - table.num_pages[slots], 0)
        lacking = int(lack[~table.protected[slots]].sum())
        return self.cache.num_available - self.promised - lacking

    def round(self, policy: AdmissionPolicy) -> AdmissionRound:
        """What the admission policy makes of the rows."""
        return self._round(policy, self.all_slots, 0)

    def _round(self, policy: AdmissionPolicy, slots: np.ndarray, freed: int) -> AdmissionRound:
        table, pool = self.slots, self.cache.pool
        # what was found at the start is no row's own: it counts once for all who share it
        own = int((table.num_pages[slots] - table.num_shared[slots]).sum())
        running = RunningSet(self.profiles(slots), table.target[slots], table.num_shared[slots])
        base = pool.num_held - freed - own
        return policy.round(running, base, pool.num_pages, self._page_size)

    def finds_room(self, sequence: Sequence, admission: AdmissionRound) -> Match | None:
        """What a waiting sequence would find of its tokens, if it may start now: there is room, and
        the admission policy says so. Otherwise None."""
        match = self.cache.match(sequence)
        if self.room(self.all_slots) < self.need(sequence, match):
            return None
        held = match.num_device - match.num_idle
        return match if self._admits(sequence, admission, held) else None

    def could_start(
        self, sequence: Sequence, policy: AdmissionPolicy, without: list[Sequence]
    ) -> bool:
        """Whether a waiting sequence might start if these rows gave way to it."""
        match = self.cache.match(sequence)
        held = Counter(page for row in without for page in row.pages)
        freed = {page for page, n in held.items() if n == self.cache.pool.references(page)}
        found = sum(page in freed for page in match.pages)  # free, and at once its own
        staying = slots_of([s for s in self.sequences if s not in without])
        if self.room(staying) + len(freed) - found < self.need(sequence, match):
            return False
        admission = self._round(policy, staying, len(freed))
        return self._admits(sequence, admission, match.num_device - match.num_idle - found)

    def _admits(self, sequence: Sequence, admission: AdmissionRound, num_shared: int) -> bool:
        """num_shared: pages of it that others hold."""
        limit = sequence.request.max_tokens
        candidate = Candidate(
            sequence.profile, sequence.num_output, limit, sequence.num_tokens, num_shared
        )
        # all that a protected one can need is in the room that it has found
        return admission.admits(candidate) or is_protected(sequence)

    def start(self, sequence: Sequence, match: Match) -> None:
        """Into a slot, with the pages that are already there."""
        page_size = self._page_size
        sequence.pages = self.cache.start(sequence, match)
        sequence.num_computed = len(sequence.pages) * page_size
        sequence.num_shared = match.num_device * page_size
        protected = is_protected(sequence)
        self.slots.enter(sequence, protected=protected)
        if protected:
            self.promised += pages_for(_most(sequence), page_size) - len(sequence.pages)
        sequence.status = Status.RUNNING
        insort(self.sequences, sequence, key=lambda s: s.order)
        self._all_slots = None

    def stop(self, sequence: Sequence, *, ended: bool) -> None:
        """Out of its slot, its pages free for others."""
        if self.slots.protected[sequence.slot]:
            self.promised -= pages_for(_most(sequence), self._page_size) - len(sequence.pages)
        self.cache.free(sequence, ended=ended)
        self.slots.leave(sequence)
        self.sequences.remove(sequence)
        self._all_slots = None

    def lacks(self, sequence: Sequence, length: int) -> int:
        """Pages that a row needs for `length` more tokens and does not have."""
        need = pages_for(sequence.num_computed + length, self._page_size)
        return max(0, need - len(sequence.pages))

    def may_take(self, sequence: Sequence) -> bool:
        return bool(self.slots.protected[sequence.slot]) or self.cache.num_available > self.promised

    def take(self, sequence: Sequence) -> None:
        """One more page for a row that may take it."""
        if self.slots.protected[sequence.slot]:
            self.promised -= 1
        self.slots.append_page(sequence, self.cache.take())

    def profiles(self, slots: np.ndarray) -> Rows:
        """What the length model sees of the rows in these slots."""
        table = self.slots
        max_tokens = table.max_tokens[slots]
        num_prompt = table.limit[slots] - max_tokens
        return Rows(table.profile[slots], table.target[slots] - num_prompt, max_tokens)


def _most(sequence: Sequence) -> int:
    """Tokens that a sequence can ever have."""
    return sequence.num_prompt + sequence.request.max_tokens
