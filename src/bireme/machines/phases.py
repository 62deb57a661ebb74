"""The phases of a run over machines that come and go: which machines train when. Pure decisions.

A phase is one start of the run over a set of machines, with a number and a plan of its own. It is prepared
beside the phase before it, which goes on training, and trains from the newest state once that has ended:

    phase 1   prepare ─ go ─ train ──────────────────── stop
    phase 2                         prepare ─ is ready ──────go ─ train ───

Nothing here reads a clock or a socket. Events are reported with the time; `turn` decides; `phases_of`
lists what a machine is to run. All of it is state, so an event that comes twice changes nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bireme.bounds import counted, seconds_text

FIRST_COST_S = 30.0
"""What a switch is taken to cost before one has been measured."""
_MOST_FAILURES = 3
"""Phases in a row that may fail without a machine lost and without a new step."""
_MISTAKE = 2
"""The exit status of a phase that no plan fits."""
_INTERRUPTED = 130
"""The exit status of a run that was stopped before it has trained."""
_STILL_TIMES, _STILL_BATCHES = 3, 30
"""A phase with lost machines stands still after this many times its longest wait for news of a step, which
come with the lines of the log, and after the time of this many batches.
"""
_LINES_S = 10.0
"""How long a run waits for the measurements of its lines before it begins."""
_CONTROLS_S = 60.0
"""How long it waits until the control was timed on all machines, which first import torch."""
_LEAST_COMPARED = 5
"""Batches of a phase after which their seconds are compared with the prediction."""


@dataclass(frozen=True, slots=True)
class PhaseRules:
    """How a run takes machines: it begins with `most` at once, and with `least` once no other has come for
    `wait_s`. A machine that has come or gone counts after `patience_s`. With `needs_all` a phase cannot go on
    without each of its machines, unless its forecast says otherwise. The run has `steps` batches, 0 if it is
    no training. If it `replans`, a stage that has been slow for `patience_s` leads to a new plan.
    """

    least: int
    most: int
    wait_s: float
    patience_s: float
    needs_all: bool
    steps: int
    replans: bool = False


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """How far a phase has come: it began after the step `first`, and a batch takes `batch_s`. `is_slow` is
    whether one of its stages has become slow.
    """

    number: int
    first: int
    step: int
    batch_s: float | None
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class PhaseForecast:
    """What a phase that is prepared predicts: `batch_s` are the seconds of a batch, `before_s` those with the
    plan of the phase before, on the devices as they are now. The machines numbered `idle` have no part in
    its plan, and stand by. If it `survives`, it goes on without some of its machines.
    """

    batch_s: float | None = None
    before_s: float | None = None
    idle: tuple[int, ...] = ()
    survives: bool = False


@dataclass(slots=True)
class _Machine:
    """A machine that is there, in one start of its `bireme join`."""

    name: str
    instance: str


@dataclass(slots=True)
class RunPhase:
    """A phase. It `goes` once it may load state and train; `end` is how its processes are to end."""

    number: int
    machines: tuple[str, ...]
    """Their keys, in the order of their ranks."""
    goes: bool = False
    end: Literal["", "stop", "kill"] = ""
    for_slow: bool = False
    """Whether it is prepared because a stage of the phase before has become slow."""
    forecast: PhaseForecast | None = None
    """None until it is prepared."""
    idle: frozenset[str] = frozenset()
    """Its machines that stand by."""
    lost: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Machines that are gone: since when, and the instance that was there."""
    statuses: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """How the processes of a machine have ended, negative for a signal."""
    went_s: float = 0.0
    end_s: float = 0.0
    first_step: int | None = None
    """The step from which it trains."""
    step: int | None = None
    moved_s: float = 0.0
    """When it last came to a new step."""
    gap_s: float = 0.0
    """The longest time that it took to a new step that was reported."""
    batch_s: float | None = None
    """Measured seconds of a batch."""
    is_compared: bool = False
    slow_s: float | None = None
    """Since when one of its stages is slow."""
    is_weighed: bool = False
    """Whether a new plan for that stage was weighed."""

    @property
    def forecast_s(self) -> float | None:
        """Predicted seconds of a batch."""
        return None if self.forecast is None else self.forecast.batch_s

    @property
    def worst(self) -> int:
        """The largest status, without the sign of a signal."""
        return max((abs(one) for own in self.statuses.values() for one in own), default=0)

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended a process."""
        return any(one < 0 for own in self.statuses.values() for one in own)


class RunPhases:
    """The machines that are there, the phase that trains, and the one that is prepared to follow it."""

    def __init__(self, rules: PhaseRules) -> None:
        self.rules = rules
        self.machines: dict[str, _Machine] = {}
        self.current: RunPhase | None = None
        self.following: RunPhase | None = None
        self.has_begun = self.is_over = False
        self.status = 1
        """The exit status of the run once it is over."""
        self.num_news = 0
        """Of phases that are ready, and of processes that have ended."""
        self._said: list[str] = []
        self.unused: set[int] = set()
        """The numbers of phases that were prepared and given up. Their processes end in any order."""
        self.is_measuring = False
        """Whether a line between the machines that are there is not measured yet."""
        self.is_timing = False
        """Whether the control is not timed yet on one of them."""
        self._number = 0
        self._changed_s = 0.0
        """When a machine came or went for the last time."""
        self._refused: set[frozenset[tuple[str, str]]] = set()
        """Sets of machines, each in one start of its `bireme join`, on which no phase could be prepared."""
        self._failed: set[tuple[str, str]] = set()
        """Machines of which the processes failed while those of others could go on."""
        self._proven: frozenset[str] = frozenset()
        """Those of the last phase that trained."""
        self._declined: frozenset[str] = frozenset()
        """Machines on which a phase would have been no gain."""
        self._stops = False
        self._awaited: frozenset[str] = frozenset()
        """Machines of a run that was taken up; they call by themselves, from `_taken_up_s` on."""
        self._taken_up_s = 0.0
        self._leaving: set[str] = set()
        """Machines that are there until a phase goes on without them."""
        self._step = 0
        self._num_failures = 0
        self._cost_s: float | None = None
        self._ended: tuple[float, float] | None = None
        """When the phase before was asked to end, and when it had ended."""

    def take_up(
        self, number: int, newest: int, gone: dict[str, str], now_s: float, *, switches: bool = False
    ) -> None:
        """Go on with a phase that a coordinator has left, after phases up to `newest`. `gone` has the
        instances of its machines, in the order of their ranks: none of them has called yet. If it `switches`
        it is to stop, or has stopped, for another phase.
        """
        lost = {key: (now_s, instance) for key, instance in gone.items()}
        self.current = RunPhase(
            number, tuple(gone), goes=True, forecast=PhaseForecast(), lost=lost, went_s=now_s
        )
        if switches:
            self._end(self.current, "stop", now_s)
        self._number, self.has_begun, self._changed_s = newest, True, now_s
        self._awaited, self._taken_up_s = frozenset(gone), now_s

    # Events.

    def come(self, key: str, name: str, instance: str, now_s: float) -> None:
        """A machine is there."""
        known = self.machines.get(key)
        if known is not None and known.instance == instance:
            return
        self.machines[key] = _Machine(name, instance)
        self._changed_s = now_s
        for phase in self.phases():
            if key not in phase.lost:
                continue
            before = phase.lost[key][1]
            # Only the line was lost if it is the same instance. Otherwise its processes have ended.
            if before == instance or (phase.goes and not self._needs_all(phase)):
                del phase.lost[key]
                phase.statuses.pop(key, None)

    def lose(self, key: str, now_s: float, *, for_good: bool = False) -> None:
        """A machine is gone: silent, revoked, or it has left; `for_good` if it has said so."""
        gone = self.machines.pop(key, None)
        self._leaving.discard(key)
        if gone is None:
            return
        self._changed_s = now_s
        for phase in self.phases():
            if key in phase.idle:
                phase.machines = tuple(one for one in phase.machines if one != key)
            elif key in phase.machines and key not in phase.statuses:
                phase.lost[key] = (now_s - (self.rules.patience_s if for_good else 0.0), gone.instance)

    def note_ready(self, number: int, forecast: PhaseForecast, idle: Sequence[str] = ()) -> None:
        """A phase is prepared. Its `idle` machines stand by."""
        for phase in self.phases():
            if phase.number == number and phase.forecast is None:
                phase.forecast, phase.idle = forecast, frozenset(idle)
                self.num_news += 1
                if names := self._names(idle):
                    self._say(f"Phase {number} has no work for these machines, which stand by: {names}.")

    def note_ended(self, number: int, key: str, statuses: Sequence[int]) -> None:
        """All processes of a phase at a machine have ended."""
        for phase in self.phases():
            is_of = phase.number == number and key in phase.machines and key not in phase.lost
            if is_of and key not in phase.statuses:
                phase.statuses[key] = tuple(statuses)
                self.num_news += 1

    def note_progress(self, found: PhaseProgress, now_s: float) -> None:
        """A phase has come so far."""
        phase, first, step, batch_s = self.current, found.first, found.step, found.batch_s
        if phase is None or phase.number != found.number or step <= max(phase.step or 0, first):
            return
        if phase.first_step is None:
            self._note_first(phase, first, now_s)
        phase.gap_s = max(phase.gap_s, now_s - max(phase.moved_s, phase.went_s))
        phase.step, phase.moved_s, phase.batch_s = step, now_s, batch_s
        if not found.is_slow:
            phase.slow_s, phase.is_weighed = None, False
        elif phase.slow_s is None:
            phase.slow_s = now_s
        self._proven = frozenset(phase.machines)
        if step > self._step:
            self._step, self._num_failures = step, 0
        if batch_s is None or phase.forecast_s is None or phase.is_compared or step - first < _LEAST_COMPARED:
            return
        phase.is_compared = True
        self._say(
            f"Phase {phase.number}: a batch takes {seconds_text(batch_s)}, and "
            f"{seconds_text(phase.forecast_s)} were predicted."
        )

    def note_leaves(self, key: str, *, leaves: bool) -> None:
        """Whether a machine is to leave once the run goes on without it."""
        if not leaves:
            self._leaving.discard(key)
        elif key in self.machines and key not in self._leaving:
            self._leaving.add(key)
            if self.has_begun:
                self._say(f"{self.machines[key].name} leaves once the run goes on without it.")

    def ask_stop(self) -> None:
        """The run is to stop in order."""
        if self.has_begun and not self._stops:
            self._say("The run stops in order on all machines. Ctrl-C again ends this machine at once.")
        self._stops = True

    # Decisions.

    def turn(self, now_s: float) -> None:
        """Decide by what is known."""
        if self.is_over:
            return
        self._drop_following()
        if self.current is not None and self._has_ended(self.current, now_s):
            self._conclude(self.current, now_s)
        if self.is_over:
            return
        if self.current is not None:
            self._watch(self.current, now_s)
        elif self._stops:
            self._finish(_INTERRUPTED if not self.has_begun else 0)
        elif self.following is not None:
            self._go(self.following, now_s)
        elif self._may_begin(now_s):
            self._prepare()
            self.turn(now_s)

    def phases_of(self, key: str) -> tuple[RunPhase, ...]:
        """The phases that a machine is to have processes of. It ends all others."""
        if key not in self.machines or self.is_over:
            return ()
        return tuple(one for one in self.phases() if key in one.machines and key not in one.lost)

    def said(self) -> list[str]:
        """The sentences since the last call."""
        found, self._said = self._said, []
        return found

    @property
    def is_switching(self) -> bool:
        """Whether the phase that trains is to stop for another one."""
        return self.current is not None and self.current.end == "stop" and not self._stops

    @property
    def newest(self) -> int:
        """The number of the newest phase."""
        return self._number

    def phases(self) -> list[RunPhase]:
        """The phase that trains and the one that is prepared, if there are such."""
        return [one for one in (self.current, self.following) if one is not None]

    def _say(self, text: str) -> None:
        self._said.append(text)

    def _names(self, keys: Sequence[str]) -> str:
        return ", ".join(self.machines[key].name for key in keys if key in self.machines)

    def _finish(self, status: int) -> None:
        if self.following is not None:
            self._give_up(self.following)
        self.is_over, self.status = True, status

    def _note_first(self, phase: RunPhase, first: int, now_s: float) -> None:
        phase.first_step = first
        load_s = now_s - phase.went_s
        if self._ended is None:
            self._cost_s = self._cost_s or load_s
            return
        asked_s, ended_s = self._ended
        self._cost_s = now_s - asked_s
        lost = max(self._step - first, 0)
        again = f" It trains {counted(lost, 'batch')} of that phase again." if lost else ""
        self._say(
            f"Phase {phase.number} trains, {seconds_text(now_s - asked_s)} after the phase before began to "
            f"end: stop {seconds_text(ended_s - asked_s)}, wait {seconds_text(phase.went_s - ended_s)}, load "
            f"and first batches {seconds_text(load_s)}.{again}"
        )

    def _may_begin(self, now_s: float) -> bool:
        """Whether to prepare a phase while none trains."""
        there, rules = self._there, self.rules
        if not self.has_begun:
            quiet_s = now_s - self._changed_s
            if self.is_measuring and quiet_s < _LINES_S:
                return False
            if self.is_timing and quiet_s < _CONTROLS_S:
                return False
            is_quiet = quiet_s >= rules.wait_s
            return len(there) >= rules.most or (len(there) >= rules.least and is_quiet)
        return bool(self._usable) and not self._is_early(now_s)

    def _is_early(self, now_s: float) -> bool:
        """Whether machines of a run that was taken up may still call."""
        is_recent = now_s - self._taken_up_s < self.rules.patience_s
        return is_recent and not self._awaited <= self.machines.keys()

    def _prepare(self, *, for_slow: bool = False) -> None:
        """Have processes of a new phase started on all machines that are there."""
        self._number += 1
        # Machines of the phase before keep their order: the first one serves the store.
        current = self.current
        before = () if current is None else current.machines
        ordered = [key for key in before if key in self._usable]
        ordered += [key for key in self.machines if key in self._usable and key not in before]
        self.following = RunPhase(self._number, tuple(ordered), for_slow=for_slow)
        names = self._names(ordered) + (", because a stage has become slow" if for_slow else "")
        beside = "" if current is None or current.lost else f" beside phase {current.number}, which goes on"
        many = counted(len(ordered), "machine")
        self._say(f"Phase {self._number} is prepared on {many}{beside}: {names}.")

    def _go(self, phase: RunPhase, now_s: float) -> None:
        phase.goes, phase.went_s = True, now_s
        self.current, self.following = phase, None
        self.has_begun = True

    def _drop_following(self) -> None:
        """Give up a phase that cannot be prepared, or that has no reason any more."""
        phase, current = self.following, self.current
        if phase is None:
            return
        there = frozenset(phase.machines)
        if phase.lost or self._stops:
            self._give_up(phase)
        elif current is not None and phase.for_slow and phase.statuses:
            current.is_weighed = True
            self._give_up(phase)
        elif phase.statuses:
            self.following = None
            self._refuse(there, phase.worst)
        elif current is not None and self._is_as_before(current, but_slow=phase.for_slow):
            self._give_up(phase)

    def _is_as_before(self, phase: RunPhase, *, but_slow: bool) -> bool:
        """Whether the machines of the phase that trains are those that are there, and none is slow if
        `but_slow`.
        """
        if but_slow and phase.slow_s is not None:
            return False
        return not phase.end and not phase.lost and self._there == set(phase.machines)

    @property
    def _there(self) -> frozenset[str]:
        """The machines that a new phase may have."""
        there = (key for key, one in self.machines.items() if (key, one.instance) not in self._failed)
        return frozenset(there) - self._leaving

    @property
    def _usable(self) -> frozenset[str]:
        """Those with which it can be prepared: all, or if that has failed, those that have trained before."""
        found = (self._there, self._there & self._proven)
        return next((keys for keys in found if keys and self._starts(keys) not in self._refused), frozenset())

    def _starts(self, keys: Iterable[str]) -> frozenset[tuple[str, str]]:
        return frozenset((key, self.machines[key].instance) for key in keys if key in self.machines)

    def _give_up(self, phase: RunPhase) -> None:
        """Go on without a phase that was prepared, though nothing of it has failed."""
        self.following = None
        self.unused.add(phase.number)

    def _refuse(self, there: frozenset[str], status: int) -> None:
        if there <= self.machines.keys():
            self._refused.add(self._starts(there))
        goes_on = self.current is not None and not (self.current.lost and self._needs_all(self.current))
        rest = "The run waits for other machines."
        if goes_on or self._usable:
            rest = "The phase before goes on." if goes_on else "The run goes on without some of them."
        self._say(
            f"The run cannot be trained on {self._names(sorted(there))} (status {status}); the lines above "
            f"say why. {rest}"
        )

    def _has_ended(self, phase: RunPhase, now_s: float) -> bool:
        left = [key for key in phase.machines if key not in phase.lost and key not in phase.statuses]
        if left:
            return False
        if phase.statuses:
            return True
        # All are gone: each of them may only have lost its line.
        return all(now_s - since_s >= self.rules.patience_s for since_s, _ in phase.lost.values())

    def _conclude(self, phase: RunPhase, now_s: float) -> None:
        """A phase has ended: is the run over, or does another one follow?"""
        statuses = phase.statuses.values()
        has_result = any(not max(map(abs, own), default=0) for own in statuses)
        if self._stops or (has_result and phase.end != "stop"):
            if self._stops and phase.step is None and phase.is_killed:
                self._say("The run was stopped before it has trained.")
                self._finish(_INTERRUPTED)
            else:
                self._finish(0 if has_result else phase.worst or 1)
            return
        is_churn = bool(phase.lost) or phase.is_killed
        is_mistake = phase.worst == _MISTAKE and not is_churn
        # Samples that no machine can read fail again on the others. Then the run ends.
        is_again = bool(self._failed) and self._num_failures > 0
        if is_mistake and phase.number > 1 and phase.step is None and not is_again:
            self.current = None
            self._refuse(frozenset(phase.machines), phase.worst)
        elif phase.end != "stop":
            self._num_failures += not phase.lost
            # The processes of other machines end with another status.
            failed = [key for key, own in phase.statuses.items() if _MISTAKE in own]
            if is_mistake and phase.step is not None and not is_again and len(failed) < len(phase.machines):
                self._failed |= self._starts(failed)
                self._say(
                    f"The run goes on without {self._names(failed)}, whose processes have failed; the lines "
                    "above say why. A machine takes part again once its bireme join is started again."
                )
            elif not is_churn or self._num_failures > _MOST_FAILURES:
                self._finish(phase.worst or 1)
                return
            rest = "the run goes on from its newest state" if self.rules.steps else "its work begins again"
            self._say(f"Phase {phase.number} has ended, and {rest}.")
        if phase.step is not None:
            began_s = phase.end_s if phase.end else now_s
            since_s = min((since_s for since_s, _ in phase.lost.values()), default=began_s)
            self._ended = (min(began_s, since_s), now_s)
        self.current = None

    def _watch(self, phase: RunPhase, now_s: float) -> None:
        """Whether the phase that trains is to end, or another one is to be prepared."""
        if self._stops:
            phase.end = phase.end or "stop"
            return
        patience_s = self.rules.patience_s
        if phase.is_killed and phase.forecast is None and phase.step is None and not phase.end:
            self._end(phase, "kill", now_s)  # the others would wait for those processes
        is_stuck = bool(phase.lost) and (self._needs_all(phase) or self._stands_still(phase, now_s))
        gone_s = max((now_s - since_s for since_s, _ in phase.lost.values()), default=0.0)
        is_other = any(key in self.machines for key in phase.lost)  # in another start of its `bireme join`
        if is_stuck and (is_other or phase.worst or gone_s >= patience_s) and phase.end != "kill":
            self._end(phase, "kill", now_s)
        following, there = self.following, self._there
        if phase.end or not there:
            return
        if following is not None:
            if following.forecast is not None and not is_stuck:
                self._decide(phase, following, now_s)
        elif there == self._usable and there not in (frozenset(phase.machines), self._declined):
            is_quiet = now_s - self._changed_s >= patience_s
            has_reason = is_quiet or (is_stuck and not self._is_early(now_s)) or self._leaving
            if phase.step is not None and has_reason:
                self._prepare()
        elif self._is_slow(phase, now_s):
            self._prepare(for_slow=True)

    def _needs_all(self, phase: RunPhase) -> bool:
        """Whether a phase cannot go on without one of its machines. While it is prepared, each is needed."""
        if phase.forecast is None:
            return self.rules.needs_all or phase.step is None
        return self.rules.needs_all and not phase.forecast.survives

    def _stands_still(self, phase: RunPhase, now_s: float) -> bool:
        """Whether too few machines must be left: no new step has come for the patience, and for longer than
        ever. Before the first step, the time is compared with the cost of a switch, from the last loss on.
        """
        if phase.step is None:
            least_s = _STILL_TIMES * (self._cost_s or FIRST_COST_S)
            since_s = max(phase.went_s, *(since_s for since_s, _ in phase.lost.values()))
        else:
            least_s = max(_STILL_TIMES * phase.gap_s, _STILL_BATCHES * (phase.batch_s or 0.0))
            since_s = phase.moved_s
        return now_s - since_s >= max(self.rules.patience_s, least_s)

    def _is_slow(self, phase: RunPhase, now_s: float) -> bool:
        """Whether a stage is slow for so long that a new plan is to be weighed."""
        if not self.rules.replans or phase.slow_s is None or phase.is_weighed or phase.lost:
            return False
        return now_s - phase.slow_s >= self.rules.patience_s

    def _end(self, phase: RunPhase, how: Literal["stop", "kill"], now_s: float) -> None:
        phase.end, phase.end_s = how, now_s

    def _decide(self, phase: RunPhase, following: RunPhase, now_s: float) -> None:
        """Switch if that saves more than it costs over the rest of the run."""
        before_s, after_s = phase.batch_s or phase.forecast_s, following.forecast_s
        predicted_s = (following.forecast and following.forecast.before_s) or phase.forecast_s
        if phase.batch_s is not None and after_s is not None:  # predictions err in one direction
            after_s = after_s * phase.batch_s / predicted_s if predicted_s else None
        leaving = [key for key in phase.machines if key in self._leaving]
        left, cost_s = max(self.rules.steps - (phase.step or 0), 0), self._cost_s or FIRST_COST_S
        if leaving:
            gains, words = True, f"{self._names(leaving)} leaves"
        elif before_s is None or after_s is None:
            gains, words = len(following.machines) > len(phase.machines), "no prediction"
        else:
            gain_s = (before_s - after_s) * left
            gains = gain_s > cost_s
            words = (
                f"{seconds_text(after_s)} a batch instead of {seconds_text(before_s)} saves "
                f"{seconds_text(max(gain_s, 0.0))} of the {counted(left, 'batch')} left, and the switch "
                f"costs about {seconds_text(cost_s)}"
            )
        if gains:
            self._say(f"Phase {following.number} follows on {self._names(following.machines)}: {words}.")
            self._end(phase, "stop", now_s)
            return
        self._say(f"Phase {phase.number} goes on without a new plan: {words}.")
        if following.for_slow:
            phase.is_weighed = True
        else:
            self._declined = frozenset(following.machines)
        self._give_up(following)
