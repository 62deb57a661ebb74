"""`bireme watch`: the page of a run over HTTP, for a browser on this machine and for no one else."""

import math
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bireme.report.page.page import LivePage, PageServer
from tests.support.command import bireme
from tests.support.patience import patience_s
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


@pytest.mark.slow
def test_the_command_prints_the_address_and_ends_at_an_interrupt(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "bireme", "watch", str(make_run(tmp_path / "run")), "--no-open"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=patience_s())
    assert process.returncode == 0, errors
    assert line.startswith(f"{tmp_path / 'run'} is at http://127.0.0.1:")
    assert "Traceback" not in errors
