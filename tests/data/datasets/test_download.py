"""Downloads: the right file under its name, or no file; from a server of our own."""

import dataclasses
import hashlib
import http.server
import threading

import pytest

import multitower as mt
from dataset_files import write_cifar10
from multitower.data.datasets import cifar10, mnist
from multitower.data.datasets.cifar10 import download_cifar10, read_cifar10
from multitower.data.datasets.download import RemoteFile, cache_directory, download
from multitower.data.datasets.mnist import download_mnist

CONTENT = bytes(range(256)) * 10_000


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path not in self.server.files:
            return self.send_error(404)
        self.server.asked.append(self.path)
        content = self.server.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", len(content) + self.server.promised_too_much)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.promised_too_much = {"/a.bin": CONTENT}, [], 0
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def remote(server, content=CONTENT, name="a.bin"):
    digest = hashlib.sha256(content).hexdigest()
    return RemoteFile(f"{server.address}/{name}", len(content), digest)


def test_a_file_arrives_with_progress_and_is_kept(server, tmp_path):
    seen = []
    path = download(remote(server), tmp_path / "new", lambda *now: seen.append(now))
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert seen[-1] == ("a.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert download(remote(server), tmp_path / "new") == path
    assert server.asked == ["/a.bin"], "it was downloaded again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "is not the expected file: its SHA-256 is"),
        ({"num_bytes": len(CONTENT) - 1}, "brings more than the 2559999 bytes"),
        ({"num_bytes": len(CONTENT) + 1}, "it ended after 2560000 of 2560001 bytes"),
        ({"url": "http://127.0.0.1:9/a.bin"}, "refused"),
        ({"url": "file:///etc/passwd"}, "not a web address"),
    ],
)
def test_a_wrong_file_leaves_nothing_behind(server, tmp_path, change, message):
    with pytest.raises(mt.DataError, match=message):
        download(dataclasses.replace(remote(server), **change), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_page_says_what_to_do_by_hand(server, tmp_path):
    with pytest.raises(mt.DataError) as caught:
        download(remote(server, name="b.bin"), tmp_path)
    assert f"By hand: download {server.address}/b.bin and put it into {tmp_path}" in str(
        caught.value
    )
    assert "Not Found" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_breaks_is_an_error(server, tmp_path):
    server.promised_too_much = 5
    with pytest.raises(mt.DataError, match="could not be downloaded"):
        download(dataclasses.replace(remote(server), num_bytes=len(CONTENT) + 5), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_none_is_an_error(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(mt.DataError, match="could not be downloaded to"):
        download(remote(server), tmp_path / "file")


def test_cifar10_is_downloaded_and_read(server, tmp_path, monkeypatch):
    (tmp_path / "origin").mkdir()
    content = write_cifar10(tmp_path / "origin", "binary").read_bytes()
    server.files = {"/cifar-10-binary.tar.gz": content}
    file = remote(server, content, "cifar-10-binary.tar.gz")
    monkeypatch.setattr(cifar10, "ARCHIVE", file)
    here = download_cifar10(tmp_path / "cache")
    assert len(read_cifar10(here)[0]["label"]) == 15


def test_mnist_is_four_files(server, tmp_path, monkeypatch):
    names = [file.name for file in mnist.FILES]
    assert len(set(names)) == 4
    server.files = {f"/{name}": name.encode() for name in names}
    files = tuple(remote(server, name.encode(), name) for name in names)
    monkeypatch.setattr(mnist, "FILES", files)
    assert sorted(p.name for p in download_mnist(tmp_path).iterdir()) == sorted(names)


def test_the_origins_are_complete():
    for file in (cifar10.ARCHIVE, *mnist.FILES):
        assert file.url.startswith("https://")
        assert len(bytes.fromhex(file.sha256)) == 32
        assert file.num_bytes > 4000


def test_the_cache_goes_where_caches_go(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("mnist") == tmp_path / "multitower" / "mnist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory("mnist") == tmp_path / ".cache" / "multitower" / "mnist"
