"""Who was not admitted, or is not any more, takes no part: for all orders of events."""

from pathlib import Path
from threading import Barrier, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.machines.admission import (
    AdmissionList,
    AdmissionToken,
    AdmittedMachine,
    change_admissions,
    digest_of,
    read_admissions,
)

KEYS = [f"{number:064x}" for number in range(1, 5)]
HEX = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(HEX, st.binary(min_size=16, max_size=16).map(bytes.hex), st.integers(0, 69), st.characters())
def test_a_token_is_read_back_and_any_other_text_is_refused(
    key: str, secret: str, place: int, other: str
) -> None:
    token = AdmissionToken(key, secret)
    text = str(token)
    assert AdmissionToken.parse(f" {text}\n") == token
    changed = text[:place] + other + text[place + 1 :]
    for wrong in (text[:place], changed):
        try:
            assert AdmissionToken.parse(wrong) == token
        except BiremeError as error:
            assert "not a whole token" in str(error)  # noqa: PT017 (the same text is read back)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("admit"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("revoke machine"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("revoke token"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 20), st.just(0)),
    ),
    max_size=30,
)


@given(EVENTS)
def test_a_machine_takes_part_only_if_a_valid_token_admitted_it_and_nobody_revoked_it(
    events: list[tuple[str, int, int]],
) -> None:
    """Against a plain account of what was given, used and revoked."""
    found, now_s = AdmissionList(), 1000.0
    secrets, ends, users, gone = list[str](), list[float](), dict[int, str](), set[int]()
    admitted, revoked = set[str](), set[str]()
    for what, first, second in events:
        if what == "give":
            found, secret = found.with_token(now_s, first)
            secrets.append(secret)
            ends.append(now_s + first)
        elif what == "wait":
            now_s += first
        elif what == "revoke machine" and KEYS[first] in admitted:
            found = found.marked(KEYS[first], is_revoked=True)
            revoked.add(KEYS[first])
        elif what == "revoke token" and first < len(secrets):
            found = found.marked(digest_of(secrets[first]), is_revoked=True)
            gone.add(first)
        elif what == "admit":
            key, secret = KEYS[second], secrets[first] if first < len(secrets) else "ab" * 16
            is_free = (
                first < len(secrets) and first not in gone and now_s < ends[first] and first not in users
            )
            is_again = users.get(first) == key and first not in gone
            if (is_free or is_again) and key not in revoked:
                found = found.admit(secret, key, f"host-{second}", now_s)
                users[first] = key
                admitted.add(key)
            else:
                with pytest.raises(BiremeError):
                    found.admit(secret, key, f"host-{second}", now_s)
        for key in KEYS:
            if key in admitted - revoked:
                assert found.check(key).public == key
            else:
                with pytest.raises(BiremeError):
                    found.check(key)


def test_a_machine_that_shows_another_token_takes_the_name_that_it_gives() -> None:
    """`bireme join --name` was of no effect on a machine that had joined before."""
    found = AdmissionList()
    for name in ("blue", "azure"):
        found, secret = found.with_token(0.0, 60.0)
        found = found.admit(secret, KEYS[0], name, 1.0)
    assert [one.name for one in found.machines] == ["azure"]


def test_the_list_in_a_file_gives_no_secret_away_and_is_read_back(tmp_path: Path) -> None:
    path, secrets = tmp_path / "admitted.json", list[str]()

    def give(before: AdmissionList) -> AdmissionList:
        after, secret = before.with_token(5.0, 60.0)
        secrets.append(secret)
        return after

    assert read_admissions(path) == AdmissionList()
    change_admissions(path, give)
    change_admissions(path, lambda one: one.admit(secrets[0], KEYS[0], "host-0", 6.0))
    changed = change_admissions(path, lambda one: one.marked("host-0", is_revoked=True))
    assert read_admissions(path) == changed
    assert secrets[0] not in path.read_text()
    with pytest.raises(BiremeError, match="has been revoked"):
        changed.check(KEYS[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [(KEYS[0], KEYS[0][:-1]), (KEYS[0], KEYS[1]), ('"since_s": 1.0', '"since_s": -1'), ("format", "formal")],
)
def test_a_list_that_was_damaged_is_not_believed(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "admitted.json"
    machines = tuple(AdmittedMachine(key, "host", 1.0) for key in KEYS[:2])
    change_admissions(path, lambda _: AdmissionList(machines))
    path.write_text(path.read_text().replace(old, new))
    before = path.read_bytes()
    with pytest.raises(BiremeError, match=r"admitted\.json"):
        change_admissions(path, lambda one: one.marked(KEYS[1], is_revoked=True))
    assert path.read_bytes() == before


def test_what_is_revoked_must_be_one_thing() -> None:
    found = AdmissionList(tuple(AdmittedMachine(key, "host", 1.0) for key in KEYS[:2]))
    for word, num in (("host", "more than one"), ("guest", "no"), ("", "more than one")):
        listed = rf"only one of them has: host \({KEYS[0][:8]}…\), host \({KEYS[1][:8]}…\)\."
        with pytest.raises(BiremeError, match=f"There is {num} machine or token .*{listed}"):
            found.marked(word, is_revoked=True)


def test_a_list_is_begun_in_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "new" / "admitted.json"
    with pytest.raises(BiremeError, match="nobody"):
        change_admissions(path, lambda found: found.marked("nobody", is_revoked=True))
    change_admissions(path, lambda found: found.with_token(0.0, 60.0)[0])
    assert len(read_admissions(path).tokens) == 1


def test_machines_that_are_admitted_at_the_same_moment_are_all_in_the_list(tmp_path: Path) -> None:
    """Threads of one coordinator admitted them. The lock held off other processes only, so that each wrote a
    list without the others, and one of three machines that joined was refused now and then.
    """
    path, count = tmp_path / "admitted.json", 8
    secrets = list[str]()

    def give(found: AdmissionList) -> AdmissionList:
        found, secret = found.with_token(0.0, 100.0)
        secrets.append(secret)
        return found

    for _ in range(count):
        change_admissions(path, give)
    together = Barrier(count)

    def admit(number: int) -> None:
        together.wait()
        change_admissions(path, lambda found: found.admit(secrets[number], f"{number:064x}", "blue", 1.0))

    threads = [Thread(target=admit, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.public for one in read_admissions(path).machines} == {f"{one:064x}" for one in range(count)}
