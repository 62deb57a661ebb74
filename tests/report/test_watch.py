"""`bireme watch`: the page of a run over HTTP, for a browser on this machine and for no one else."""

import math
import os
import socket
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bireme.report.page.page import LivePage, PageServer
from tests.support.command import bireme
from tests.support.run_folders import lines_of, make_run, write_lines
from tests.support.served_pages import served


def get(server: PageServer, path: str, host: str | None = None) -> HTTPResponse:
    found = urlsplit(server.address)
    connection = HTTPConnection("127.0.0.1", found.port or 0, timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host or found.netloc)
    connection.endheaders()
    return connection.getresponse()


def page_of(server: PageServer, rest: str = "") -> str:
    answer = get(server, urlsplit(server.address).path + rest)
    assert answer.status == 200
    return answer.read().decode()


def test_the_page_follows_a_run_from_before_its_begin_to_a_damaged_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bireme.report.page.page._LEAST_S", 0.0)
    monkeypatch.setattr("bireme.report.page.page._PACE", 0.0)
    monkeypatch.setattr("bireme.report.page.page._AGE_S", math.inf)
    folder = tmp_path / "later"
    with served(folder) as server:
        first = page_of(server, "version")
        assert "The run has not begun: there is no" in page_of(server)
        make_run(folder)
        second = page_of(server, "version")
        assert second != first
        text = page_of(server)
        assert f'data-version="{second}"' in text
        assert "<title>later" in text
        assert "connect-src &#x27;self&#x27;" in text
        assert page_of(server, "version") == second
        write_lines(folder, [*lines_of(300), {"kind": "train"}, {"kind": "start", "step": 0, "time_s": 1}])
        assert page_of(server, "version") != second
        assert "Line " in page_of(server)


def test_a_page_that_takes_long_is_not_made_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bireme.report.page.page._LEAST_S", math.inf)
    folder = make_run(tmp_path / "run")
    page = LivePage(folder, "0.1.0")
    before = page.newest()
    write_lines(folder, list(lines_of(300))[:-1])
    assert page.newest() == before


def test_other_sites_other_hosts_and_guesses_get_nothing(tmp_path: Path) -> None:
    with served(make_run(tmp_path / "run")) as server:
        path = urlsplit(server.address).path
        port = server.server_address[1]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::1]"):
            answer = get(server, path, host or " ")
            assert answer.status == 403
            assert b"<html" not in answer.read()
        for guess in ("/", "/version", f"{path[:-2]}/", "/x/version", f"{path}other", "/%FF/"):
            assert get(server, guess).status == 404, guess
        for host in ("localhost", f"localhost:{port}", "127.0.0.1:1"):
            answer = get(server, path, host)
            assert answer.status == 200
            assert answer.getheader("X-Frame-Options") == "DENY"
            assert answer.getheader("Cache-Control") == "no-store"
        assert server.server_address[0] == "127.0.0.1"


def test_two_servers_have_different_addresses(tmp_path: Path) -> None:
    with served(tmp_path) as one, served(tmp_path) as other:
        assert urlsplit(one.address).path != urlsplit(other.address).path


def test_what_cannot_be_watched_is_refused_with_a_way_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    result = bireme(capsys, "watch", str(tmp_path), "--no-open")
    assert result.status == 2
    assert f"Name one of the runs in it, such as {tmp_path / 'run'}." in result.err
    (tmp_path / "file").write_text("x")
    assert bireme(capsys, "watch", str(tmp_path / "file"), "--no-open").status == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = bireme(capsys, "watch", str(tmp_path / "run"), "--no-open", "--port", str(port))
    assert result.status == 2
    assert f"Port {port} of 127.0.0.1 cannot be used: Address already in use." in result.err


def test_programs_learn_the_address_and_people_that_a_run_has_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed and how it ends is tested with the page `watch.md`."""
    monkeypatch.setattr(PageServer, "serve_forever", lambda _: None)
    make_run(tmp_path / "run")
    for name, has_begun in (("run", True), ("later", False)):
        result = bireme(capsys, "watch", str(tmp_path / name), "--no-open", "--json")
        assert result.document["address"].startswith("http://127.0.0.1:")
        assert result.document["has_begun"] == has_begun
        assert (f"No run has begun in {tmp_path / name}." in result.err) != has_begun


def test_the_newest_run_is_watched_if_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageServer, "serve_forever", lambda _: None)
    monkeypatch.chdir(tmp_path)
    assert "There is no run in runs." in bireme(capsys, "watch").err
    for name, written_s in (("b", 1), ("a", 3), ("c", 2)):
        log = tmp_path / "runs" / name / "metrics.jsonl"
        log.parent.mkdir(parents=True)
        log.touch()
        os.utime(log, (written_s, written_s))
    assert bireme(capsys, "watch", "--no-open", "--json").document["run"] == "runs/a"
