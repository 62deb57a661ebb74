"""The phases of a run over machines that come and go: whatever is reported, in any order, twice or never."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.machines.phases import FIRST_COST_S, PhaseForecast, PhaseProgress, PhaseRules, RunPhases

RULES = PhaseRules(least=2, most=3, wait_s=5.0, patience_s=10.0, needs_all=True, steps=1000)
NAMES = "abcde"


class Story:
    """Phases of a run, told in the words of a test."""

    def __init__(self, rules: PhaseRules = RULES, machines: str = "") -> None:
        self.phases, self.now_s = RunPhases(rules), 0.0
        self.said: list[str] = []
        self.come(machines)

    def come(self, machines: str, instance: str = "1") -> None:
        for one in machines:
            self.phases.come(one, one, instance, self.now_s)
        self.turn()

    def lose(self, machines: str, *, for_good: bool = False) -> None:
        for one in machines:
            self.phases.lose(one, self.now_s, for_good=for_good)
        self.turn()

    def turn(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.phases.turn(self.now_s)
        self.said += self.phases.said()

    def progress(
        self, step: int, *, first: int = 0, batch_s: float | None = 1.0, is_slow: bool = False
    ) -> None:
        assert self.phases.current is not None
        found = PhaseProgress(self.phases.current.number, first, step, batch_s, is_slow)
        self.phases.note_progress(found, self.now_s)
        self.turn()

    def ready(self, batch_s: float | None, before_s: float | None = None, idle: str = "") -> None:
        assert self.phases.following is not None
        self.phases.note_ready(self.phases.following.number, PhaseForecast(batch_s, before_s), idle)
        self.turn()

    def end(self, number: int, **statuses: int) -> None:
        for one, status in statuses.items():
            self.phases.note_ended(number, one, [status])
        self.turn()

    @property
    def trains(self) -> tuple[int, str]:
        current = self.phases.current
        return (0, "") if current is None else (current.number, "".join(current.machines))


def test_a_run_begins_with_the_most_machines_at_once_and_with_the_least_after_a_wait() -> None:
    story = Story(machines="ab")
    assert story.trains == (0, "")
    story.turn(5.0)
    assert story.trains == (1, "ab")
    assert Story(machines="abc").trains == (1, "abc")


def test_a_run_waits_for_the_measurements_of_its_lines_and_not_for_long() -> None:
    for seconds, is_measuring in ((1.0, False), (10.0, True)):
        story = Story()
        story.phases.is_measuring = True
        story.come("abc")
        story.turn(0.9)
        assert story.trains == (0, "")
        story.phases.is_measuring = is_measuring
        story.turn(seconds)
        assert story.trains == (1, "abc")


def test_a_run_waits_longer_for_the_speeds_of_machines_that_import_torch() -> None:
    story = Story()
    story.phases.is_timing = True
    story.come("abc")
    story.turn(59.0)
    assert story.trains == (0, "")
    story.turn(60.0)
    assert story.trains == (1, "abc")


def test_a_pipeline_that_loses_a_machine_goes_on_over_the_others() -> None:
    story = Story(machines="abc")
    story.progress(20)
    story.turn(3.0)
    story.lose("c")
    story.turn(4.0)
    assert story.trains == (1, "abc")  # only its line may be lost
    story.end(1, a=1, b=1)
    story.turn()
    assert story.trains == (2, "ab")
    story.now_s += 6.0
    story.progress(11, first=10)
    assert "It trains 10 batches of that phase again" in story.said[-1]
    assert "10 s after the phase before began to end: stop 4 s, wait 0 s" in story.said[-1]
    story.end(2, a=0, b=0)
    assert (story.phases.is_over, story.phases.status) == (True, 0)


def test_work_that_is_no_training_begins_again_on_the_other_machines_and_stops_at_once() -> None:
    story = Story(replace(RULES, steps=0), "abc")
    story.lose("c")
    story.end(1, a=1, b=1)
    assert "Phase 1 has ended, and its work begins again." in story.said
    assert story.trains == (2, "ab")
    story.phases.ask_stop()
    story.turn()
    assert story.phases.phases_of("a")[0].end == "stop"
    story.end(2, a=130, b=130)
    assert (story.phases.is_over, story.phases.status) == (True, 130)


def test_processes_are_killed_at_once_if_those_of_another_machine_have_noticed_the_loss() -> None:
    story = Story(machines="abc")
    story.progress(20)
    story.end(1, a=1)
    assert story.phases.phases_of("b")[0].end == ""  # it may end by itself, and say why
    story.lose("c")
    assert story.phases.phases_of("b")[0].end == "kill"
    late = Story(machines="abc")
    late.progress(20)
    late.end(1, a=0)
    late.lose("c")
    assert late.phases.phases_of("b")[0].end == ""  # the run comes to its end


def test_processes_that_do_not_notice_a_lost_machine_are_killed_after_the_patience() -> None:
    story = Story(machines="abc")
    story.progress(20)
    story.lose("c")
    story.turn(10.0)
    assert story.phases.phases_of("a")[0].end == "kill"
    story.end(1, a=-9, b=-9)
    story.turn()
    assert story.trains == (2, "ab")


def test_a_machine_that_leaves_trains_until_a_phase_without_it_is_prepared() -> None:
    story = Story(machines="abc")
    story.progress(20)
    for _ in range(2):
        story.phases.note_leaves("c", leaves=True)
        story.turn()
    assert [one.number for one in story.phases.phases_of("c")] == [1]
    assert story.said[-2:] == [
        "c leaves once the run goes on without it.",
        "Phase 2 is prepared on 2 machines beside phase 1, which goes on: a, b.",
    ]
    story.ready(99.0)  # slower, and there is no choice
    assert story.phases.phases_of("c")[0].end == "stop"
    story.end(1, a=0, b=0, c=0)
    story.turn()
    assert story.trains == (2, "ab")
    assert story.phases.phases_of("c") == ()
    story.lose("c", for_good=True)
    story.come("c", "2")
    story.progress(30, first=20)
    story.turn(10.0)
    assert [one.number for one in story.phases.phases_of("c")] == [3]


def test_a_machine_that_leaves_before_the_run_begins_is_not_waited_for_and_does_not_count() -> None:
    story = Story(machines="ab")
    story.phases.note_leaves("b", leaves=True)
    story.turn(60.0)
    assert story.trains == (0, "")
    story.phases.note_leaves("b", leaves=False)
    story.turn()
    assert story.trains == (1, "ab")


def test_a_phase_that_is_taken_up_goes_on_with_the_machines_that_call() -> None:
    story = Story(replace(RULES, needs_all=False))
    story.phases.take_up(4, 5, {"a": "1", "b": "1", "c": "1"}, 0.0)
    story.turn()
    assert story.phases.phases_of("a") == ()
    story.come("ab")
    assert story.phases.phases_of("a")[0].goes
    assert story.trains == (4, "abc")
    story.progress(20)
    story.turn(5.0)
    story.progress(21)
    story.turn(5.0)
    assert story.phases.following is not None
    assert (story.phases.following.number, story.phases.following.machines) == (6, ("a", "b"))


def test_a_phase_that_was_stopped_for_another_one_when_its_coordinator_was_lost_is_not_the_end() -> None:
    """Some machines may not have been told to stop."""
    story = Story()
    story.phases.take_up(1, 2, {"a": "1", "b": "1"}, 0.0, switches=True)
    story.come("ab")
    story.turn(50.0)
    assert (story.trains, story.phases.newest) == ((1, "ab"), 2)
    assert story.phases.phases_of("a")[0].end == "stop"
    story.end(1, a=0, b=0)
    story.turn()
    assert story.trains == (3, "ab")


def test_a_phase_that_failed_before_it_is_taken_up_is_followed_once_its_machines_have_called() -> None:
    """The first that called trained alone, also if it reported its progress before its processes ended."""
    for others, after_s, trains, step in (("b", 0.0, "ab", 0), ("b", 0.0, "ab", 7), ("", 10.0, "a", 7)):
        story = Story()
        story.phases.take_up(1, 1, {"a": "1", "b": "0"}, 0.0)
        story.come("a")
        story.progress(step)
        story.end(1, a=1)
        story.turn(5.0)
        assert story.trains == (0, "")
        story.come(others)
        story.turn(after_s)
        assert story.trains == (2, trains)


def test_a_machine_that_is_started_again_has_lost_its_processes() -> None:
    story = Story(machines="abc")
    story.progress(20)
    story.lose("c")
    story.come("c", "2")
    assert story.phases.phases_of("c") == ()
    assert story.phases.phases_of("a")[0].end == "kill"
    story.end(1, a=-9, b=-9)
    story.turn()
    assert story.trains == (2, "ab")  # which was prepared meanwhile
    story.progress(30, first=20)
    story.turn(10.0)
    assert [one.number for one in story.phases.phases_of("c")] == [3]


def test_a_machine_whose_line_alone_was_lost_stays() -> None:
    """The phase without it, which is prepared meanwhile, is dropped."""
    story = Story(machines="abc")
    story.progress(20)
    story.lose("c")
    story.turn(5.0)
    assert story.phases.phases_of("c") == ()
    assert [one.number for one in story.phases.phases_of("a")] == [1, 2]
    story.come("c")
    story.turn(20.0)
    assert [one.number for one in story.phases.phases_of("c")] == [1]
    assert [one.end for one in story.phases.phases()] == [""]


def test_a_newcomer_is_used_if_that_gains_more_than_it_costs() -> None:
    for batch_s, follows in ((0.5, True), (0.99, False)):
        story = Story(replace(RULES, wait_s=0.0), "ab")
        story.now_s += 20.0
        story.phases.note_ready(1, PhaseForecast(1.0))
        story.progress(20)
        story.come("c")
        assert story.phases.following is None
        story.turn(10.0)
        assert [one.number for one in story.phases.phases_of("c")] == [2]
        story.ready(batch_s)
        assert ("follows" in story.said[-1]) == follows
        assert "of the 980 batches left" in story.said[-1]
        if not follows:
            assert story.phases.phases_of("c") == ()
            assert story.phases.unused == {2}
            story.turn(1000.0)
            assert story.phases.newest == 2  # it is not tried again
            continue
        assert story.phases.phases_of("a")[0].end == "stop"
        assert not story.phases.phases_of("c")[0].goes
        story.end(1, a=0, b=0)
        story.turn()
        assert story.trains == (2, "abc")
        assert story.phases.phases_of("c")[0].goes


def test_a_predicted_time_is_corrected_by_what_the_present_plan_takes() -> None:
    """A prediction of half the time that the present plan takes gains nothing if that plan had the same."""
    story = Story(replace(RULES, wait_s=0.0), "ab")
    story.phases.note_ready(1, PhaseForecast(0.5))
    story.progress(20, batch_s=1.0)
    story.come("c")
    story.turn(10.0)
    story.ready(0.5)
    assert "goes on without a new plan" in story.said[-1]


def slow(batch_s: float = 2.0, **rules: object) -> Story:
    """A run whose plan promised 1 s a batch, with a stage that has been slow for as long as it may."""
    story = Story(replace(RULES, wait_s=0.0, replans=True, **rules), "ab")  # type: ignore[arg-type]
    story.now_s += 20.0
    story.phases.note_ready(1, PhaseForecast(1.0))
    story.progress(20)
    story.progress(30, batch_s=batch_s, is_slow=True)
    assert story.phases.following is None
    story.turn(10.0)
    return story


def test_a_stage_that_stays_slow_leads_to_a_new_plan_on_the_same_machines() -> None:
    """Its gain is from what the present plan should take on the devices as they are now."""
    story = slow()
    assert story.said[-1].endswith("goes on: a, b, because a stage has become slow.")
    story.ready(1.2, before_s=1.6)
    assert "1.5 s a batch instead of 2 s saves 485 s of the 970 batches left" in story.said[-1]
    story.end(1, a=0, b=0)
    story.turn()
    assert story.trains == (2, "ab")


def test_a_slow_stage_is_weighed_once_until_it_has_recovered() -> None:
    for outcome in ("no gain", "fails"):
        story = slow()
        if outcome == "no gain":
            story.ready(1.6, before_s=1.6)
        else:
            story.end(2, a=2, b=2)
        assert story.phases.following is None
        story.progress(31, is_slow=True)
        story.turn(100.0)
        assert story.phases.newest == 2
        story.progress(32)
        story.progress(33, is_slow=True)
        story.turn(10.0)
        assert story.phases.newest == 3
        story.end(1, a=-9, b=1)  # and the run goes on over the same machines
        story.turn()
        assert story.trains == (3, "ab")


def test_a_stage_that_recovers_meanwhile_keeps_its_plan() -> None:
    story = slow()
    story.progress(31)
    assert story.phases.following is None
    assert story.phases.unused == {2}


def test_a_slow_stage_is_not_weighed_unless_the_run_asks_for_that() -> None:
    story = Story(replace(RULES, wait_s=0.0), "ab")
    story.progress(30, is_slow=True)
    story.turn(1000.0)
    assert story.phases.newest == 1


def test_the_loss_of_a_machine_that_stands_by_changes_nothing() -> None:
    story = Story(machines="abc")
    assert story.phases.current is not None
    story.phases.note_ready(1, PhaseForecast(1.0, idle=(2,)), "c")
    story.progress(20)
    assert "Phase 1 has no work for these machines, which stand by: c." in "".join(story.said)
    story.lose("c")
    story.turn(100.0)
    assert (story.trains, story.phases.newest) == ((1, "ab"), 1)
    story.come("c", "2")
    story.turn(10.0)
    assert [one.number for one in story.phases.phases_of("c")] == [2]
    story.end(1, a=0, b=0)
    assert (story.phases.is_over, story.phases.status) == (True, 0)


def test_with_too_few_machines_the_run_waits_for_others() -> None:
    story = Story(machines="abc")
    story.progress(20)
    story.lose("bc", for_good=True)
    story.turn()
    story.end(1, a=1)
    story.turn()
    assert story.trains == (2, "a")
    story.end(2, a=2)
    story.turn(100.0)
    assert story.trains == (0, "")
    assert "The run waits for other machines." in story.said[-1]
    story.come("d")
    assert story.trains == (3, "ad")


def test_a_phase_that_fails_at_a_newcomer_is_followed_by_one_over_the_machines_before() -> None:
    """Its files cannot be written there, which shows once the phase before has ended. Another start of its
    `bireme join` is tried again.
    """
    story = Story(replace(RULES, wait_s=0.0), "ab")
    story.progress(20)
    story.come("c")
    story.turn(10.0)
    story.ready(0.1)
    story.end(1, a=0, b=0)
    assert story.trains == (2, "abc")
    story.end(2, a=2, b=2, c=2)
    story.turn()
    assert story.trains == (3, "ab")
    assert any("The run goes on without some of them." in one for one in story.said)
    story.progress(30, first=20)
    story.turn(100.0)
    assert story.phases.newest == 3
    story.lose("c")
    story.come("c", "2")
    story.turn(10.0)
    assert [one.number for one in story.phases.phases_of("c")] == [4]


def test_a_part_of_machines_on_which_no_plan_fits_is_tried() -> None:
    """A given plan is for one number of machines."""
    story = Story(machines="abc")
    story.progress(20)
    story.lose("c")
    story.end(1, a=1, b=1)
    story.turn()
    story.end(2, a=2, b=2)
    story.turn(100.0)
    assert story.trains == (0, "")
    story.lose("a")
    assert story.trains == (3, "b")


def test_a_machine_that_fails_itself_is_left_out_of_the_next_phase() -> None:
    """It cannot fetch a piece of the data. Once its `bireme join` is started again it is used again."""
    story = Story(machines="abc")
    story.progress(20)
    story.end(1, a=1, b=2, c=1)
    story.turn()
    assert story.trains == (2, "ac")
    assert "The run goes on without b, whose processes have failed" in "".join(story.said)
    story.progress(30, first=20)
    story.turn(100.0)
    assert story.phases.newest == 2
    story.lose("b")
    story.come("b", "2")
    story.turn(10.0)
    assert [one.number for one in story.phases.phases_of("b")] == [3]


@pytest.mark.parametrize("step", [0, 20, 21])
def test_a_mistake_that_the_other_machines_make_too_ends_the_run(step: int) -> None:
    story = Story(machines="abc")
    story.progress(20)
    story.end(1, a=1, b=2, c=1)
    story.turn()
    story.progress(step)
    story.end(2, a=2, c=1)
    story.turn()
    assert (story.phases.is_over, story.phases.status) == ((True, 2) if step < 21 else (False, 1))


def test_a_run_that_ends_gives_up_the_phase_that_is_prepared() -> None:
    """Its processes lose each other one after the other, which is no news."""
    story = Story(replace(RULES, wait_s=0.0), "ab")
    story.progress(20)
    story.come("c")
    story.turn(10.0)
    story.end(1, a=0, b=0)
    assert (story.phases.is_over, story.phases.unused) == (True, {2})


def test_a_run_that_fails_without_a_lost_machine_ends() -> None:
    story = Story(machines="abc")
    story.progress(20)
    story.end(1, a=1, b=1, c=1)
    assert (story.phases.is_over, story.phases.status) == (True, 1)


def test_a_process_that_is_killed_again_and_again_ends_the_run() -> None:
    story = Story(machines="abc")
    for number in range(1, 5):
        story.turn()
        assert story.trains[0] == number
        story.end(number, a=-9, b=1, c=1)
    assert (story.phases.is_over, story.phases.status) == (True, 9)


@pytest.mark.parametrize("is_known_before", [False, True])
def test_a_member_of_a_quorum_returns_to_its_phase(is_known_before: bool) -> None:
    """The mode is the run file's, or the planner has chosen it for this phase."""
    story = Story(replace(RULES, needs_all=not is_known_before), "abc")
    story.phases.note_ready(1, PhaseForecast(1.0, survives=True))
    story.progress(20)
    story.lose("c")
    story.turn(5.0)
    story.come("c", "2")
    story.turn(100.0)
    assert [one.number for one in story.phases.phases_of("c")] == [1]
    assert story.phases.newest == 1


def test_a_quorum_that_stands_still_without_lost_machines_is_followed_by_those_that_are_left() -> None:
    """The phase over fewer machines is slower, so that weighing it would keep the one that stands still."""
    story = Story(replace(RULES, needs_all=False), machines="abc")
    story.progress(20, batch_s=0.4)
    story.turn(4.0)
    story.progress(21, batch_s=0.4)
    story.lose("bc")
    story.turn(11.0)
    assert story.phases.phases_of("a")[0].end == ""
    story.turn(1.0)
    assert story.phases.phases_of("a")[0].end == "kill"
    story.end(1, a=-9)
    assert story.trains == (2, "a")


def test_a_quorum_that_loses_a_machine_while_it_is_prepared_is_prepared_again() -> None:
    """Its processes wait for each other, so that no step would ever come."""
    story = Story(replace(RULES, needs_all=False), machines="abc")
    story.lose("c")
    story.turn(9.0)
    assert story.phases.phases_of("a")[0].end == ""  # only its line may be lost
    story.turn(1.0)
    assert story.phases.phases_of("a")[0].end == "kill"
    story.end(1, a=-9, b=-9)
    assert story.trains == (2, "ab")


def test_a_phase_of_which_a_process_is_killed_while_it_is_prepared_is_prepared_again() -> None:
    """An interrupt of `bireme join` does that: the processes of the others wait for its own."""
    story = Story(machines="abc")
    story.end(1, c=-15)
    assert story.phases.phases_of("a")[0].end == "kill"
    story.lose("c", for_good=True)
    story.end(1, a=-9, b=-9)
    assert story.trains == (2, "ab")


def test_a_quorum_that_loses_too_many_machines_before_its_first_step_is_prepared_again() -> None:
    """It may load for long, so that the time counts from the loss on."""
    story = Story(replace(RULES, needs_all=False), machines="abc")
    story.phases.note_ready(1, PhaseForecast(1.0))
    story.turn(500.0)
    story.lose("bc")
    story.turn(3 * FIRST_COST_S - 1.0)
    assert story.phases.phases_of("a")[0].end == ""
    story.turn(1.0)
    assert story.phases.phases_of("a")[0].end == "kill"
    story.end(1, a=-9)
    assert story.trains == (2, "a")


def test_a_phase_that_was_taken_up_is_not_compared_with_a_prediction() -> None:
    """What was predicted of it is not known any more, so a faster prediction may be no gain."""
    story = Story(replace(RULES, needs_all=False))
    story.phases.take_up(1, 1, {"a": "1", "b": "1", "c": "1"}, 0.0)
    story.come("ab")
    story.progress(20, batch_s=5.0)
    story.turn(9.0)
    story.progress(30, batch_s=5.0)
    story.turn(1.0)
    story.ready(1.0)
    assert story.trains == (1, "abc")
    assert story.phases.phases_of("a")[0].end == ""
    assert story.said[-1] == "Phase 1 goes on without a new plan: no prediction."


def test_a_stop_ends_the_run_and_no_phase_follows() -> None:
    story = Story(replace(RULES, wait_s=0.0), "ab")
    story.progress(20)
    story.come("c")
    story.turn(10.0)
    story.phases.ask_stop()
    story.turn()
    assert story.phases.phases_of("c") == ()
    assert story.phases.phases_of("a")[0].end == "stop"
    story.end(1, a=0, b=0)
    assert (story.phases.is_over, story.phases.status) == (True, 0)


def test_a_run_that_is_stopped_while_it_is_planned_says_so() -> None:
    """The status was that of the signal that ends its processes, and no line said why."""
    story = Story(machines="abc")
    story.phases.ask_stop()
    story.turn()
    assert story.phases.phases_of("a")[0].end == "stop"
    story.end(1, a=-15, b=-15, c=-15)
    assert (story.phases.is_over, story.phases.status) == (True, 130)
    assert story.said[-2:] == [
        "The run stops in order on all machines. Ctrl-C again ends this machine at once.",
        "The run was stopped before it has trained.",
    ]


EVENTS = st.one_of(
    st.tuples(st.just("come"), st.sampled_from(NAMES), st.sampled_from("12")),
    st.tuples(st.just("lose"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("leaves"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(
        st.just("ready"),
        st.integers(1, 6),
        st.sampled_from([None, 0.1, 1.0, 9.0]),
        st.sampled_from(["", "c"]),
    ),
    st.tuples(st.just("end"), st.integers(1, 6), st.sampled_from(NAMES), st.sampled_from([0, 1, 2, -9])),
    st.tuples(st.just("progress"), st.integers(1, 6), st.integers(0, 50), st.booleans()),
    st.tuples(st.just("turn"), st.sampled_from([0.0, 1.0, 20.0])),
)


@given(st.lists(EVENTS, max_size=60), st.booleans(), st.booleans())
def test_any_order_loss_and_doubling_of_events(
    events: list[tuple[object, ...]], needs_all: bool, doubles: bool
) -> None:
    phases, now_s = RunPhases(replace(RULES, needs_all=needs_all, replans=doubles)), 0.0
    numbers: dict[int, tuple[str, ...]] = {}
    for event in [one for one in events for _ in range(1 + doubles)]:
        match event:
            case "come", str(key), str(instance):
                phases.come(key, key, instance, now_s)
            case "lose", str(key), bool(for_good):
                phases.lose(key, now_s, for_good=for_good)
            case "leaves", str(key), bool(leaves):
                phases.note_leaves(key, leaves=leaves)
            case "ready", int(number), batch_s, str(idle):
                phases.note_ready(number, PhaseForecast(batch_s), idle)  # type: ignore[arg-type]  # as drawn
            case "end", int(number), str(key), int(status):
                phases.note_ended(number, key, [status])
            case "progress", int(number), int(step), bool(is_slow):
                phases.note_progress(PhaseProgress(number, 0, step, 1.0, is_slow), now_s)
            case "turn", float(after_s):
                now_s += after_s
        before = phases.newest
        there = set(phases.machines)
        phases.turn(now_s)
        for phase in phases.phases():
            first = numbers.setdefault(phase.number, phase.machines)
            assert set(first) - phase.idle <= set(phase.machines) <= set(first)
            assert len(set(phase.machines)) == len(phase.machines) > 0
            if phase.number > before:
                assert set(phase.machines) <= there  # a new plan is over machines that are there
        assert [one.goes for one in phases.phases() if one is phases.following] in ([], [False])
        for key in NAMES:
            found = phases.phases_of(key)
            assert not found or (key in there and not phases.is_over)
            assert all(key in one.machines and key not in one.lost for one in found)
        assert len([one for one in phases.phases() if one.goes]) <= 1
