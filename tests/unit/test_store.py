"""Stores beyond their contract: addresses, crashes, full disks, and servers that misbehave."""

from __future__ import annotations

import functools
import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import Subscriber, open_store
from pulse.errors import InvalidKey, NotFound, StoreUnavailable, StoreUnsuitable
from pulse.store import LocalStore, MemoryStore, check_key
from pulse.store.remote import RemoteStore
from tests.chains import advance, copied, follow, published, receiver


@pytest.mark.parametrize(
    ("url", "kind"),
    [("some/folder", LocalStore), ("/some/folder", LocalStore), ("file:///some/folder", LocalStore), ("memory://a", MemoryStore)],
)
def test_an_address_names_the_kind_of_store(url: str, kind: type) -> None:
    assert isinstance(open_store(url), kind)


def test_a_path_object_is_an_address(tmp_path: Path) -> None:
    assert open_store(tmp_path).url == tmp_path.as_uri()


def test_the_url_of_a_folder_leads_back_to_it_whatever_it_is_called(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a b%20c#d?e")
    store.put("x", b"1")
    assert open_store(store.url).get("x") == b"1"


def test_opening_a_store_creates_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new")
    assert store.list() == []
    assert not (tmp_path / "new").exists()


def test_a_memory_store_is_shared_by_its_name_and_by_nothing_else() -> None:
    open_store("memory://shared-by-name").put("x", b"1")
    assert open_store("memory://shared-by-name").get("x") == b"1"
    with pytest.raises(NotFound):
        open_store("memory://another").get("x")


@pytest.mark.parametrize("url", ["ftp://host/x", "file://host/x", "file://relative", "", "s3://", "az://container-without-account/x"])
def test_an_address_that_leads_nowhere_is_refused_by_name(url: str) -> None:
    with pytest.raises(StoreUnsuitable, match=url.split(":", maxsplit=1)[0] or "empty"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run"])
def test_a_bucket_is_opened_without_being_contacted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert open_store(url).url == url


@given(st.text(alphabet=st.sampled_from("abZ09._-/\\~ \0\nä*:"), max_size=40))
def test_a_key_that_is_accepted_stays_inside_and_means_one_file(key: str) -> None:
    root = Path("/root/of/store")
    try:
        check_key(key)
    except InvalidKey:
        return
    path = Path(os.path.normpath(root / key))
    assert path.is_relative_to(root)
    assert path.relative_to(root).as_posix() == key
    assert not any(part.startswith(".") for part in path.relative_to(root).parts)


# --- a folder ---


def test_what_lies_hidden_in_a_folder_is_no_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    (tmp_path / "a" / ".tmp-left-by-a-crash").write_bytes(b"half")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"x")
    assert store.list() == ["a/b"]
    assert store.list("a") == ["a/b"]


def test_a_folder_is_no_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1")
    for call in (store.get, store.size):
        with pytest.raises(NotFound):
            call("a")
    store.delete("a")
    assert store.get("a/b") == b"1"


def test_an_object_where_a_folder_should_be_is_said_to_be_in_the_way(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    for if_absent in (False, True):
        with pytest.raises(StoreUnsuitable, match="a/b: Not a directory"):
            store.put("a/b", b"2", if_absent=if_absent)


def test_no_temporary_file_outlives_a_put_that_lost(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for _ in range(2):
        try:
            store.put("a", b"1", if_absent=True)
        except Exception as error:  # noqa: BLE001  the second one
            assert type(error).__name__ == "AlreadyExists"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_killed_writer_leaves_whole_objects_only(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys
        from pulse.store import LocalStore
        store = LocalStore(sys.argv[1])
        print("ready", flush=True)
        for i in range(10**9):
            store.put(f"objects/{i % 7}", bytes([i % 256]) * 3_000_000, if_absent=i < 7)
    """)
    sizes = set()
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        writer = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.02 + 0.013 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        store = LocalStore(folder)
        for key in store.list():
            data = store.get(key)
            sizes.add(len(data))
            assert data == data[:1] * len(data)
    assert sizes == {3_000_000}


def fill_until_it_fails(folder: Path) -> None:
    """A publisher on a disk that fills up: what was published stays whole, the failure says what to do, and room lets it go on."""
    trainer, publisher, history = published(LocalStore(folder / "store"), 3)
    follower = receiver()
    subscriber = Subscriber(LocalStore(folder / "store"), follower)
    advance(subscriber)
    objects = {key: LocalStore(folder / "store").get(key) for key in LocalStore(folder / "store").list()}
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    trainer.step()
    lost = trainer.bits()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"No space left on device; make room there and retry"):
            publisher.publish()
    assert {key: LocalStore(folder / "store").get(key) for key in LocalStore(folder / "store").list()} == objects
    assert not list((folder / "store").rglob(".tmp-*"))
    assert subscriber.fetch() is None
    assert follow(LocalStore(folder / "store")) == (2, history[2])
    filler.unlink()
    trainer.step()
    publisher.publish()
    advance(subscriber)
    assert copied(follower) == trainer.bits() != lost
    publisher.close()


def test_a_full_disk_leaves_the_chain_as_it_was_and_room_lets_it_go_on(small_disk: Path) -> None:
    fill_until_it_fails(small_disk)


def test_a_limit_on_file_sizes_leaves_the_chain_as_it_was(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import resource, sys
        import numpy as np
        from pulse import MemoryWeights, Publisher, open_store
        from pulse.errors import StoreUnavailable
        weights = MemoryWeights({"w": np.zeros(300_000, np.float32)})
        publisher = Publisher(open_store(sys.argv[1]), weights)
        publisher.publish()
        before = publisher._versions.store.list()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        weights.tensors["w"].flat[:] = np.random.default_rng(0).integers(0, 2**32, 300_000, np.uint32)
        try:
            publisher.publish()
        except StoreUnavailable as error:
            print(error)
        assert publisher._versions.store.list() == before
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(publisher.publish().version)
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "s")], capture_output=True, text=True, check=True)
    assert "File too large; make room there and retry" in done.stdout
    assert done.stdout.splitlines()[-1] == "1"
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_folder_that_can_never_be_written_is_unsuitable_and_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnsuitable, match="Not a directory"):
        LocalStore(tmp_path / "file" / "store").put("a", b"1")


# --- servers ---


class Misbehaving(http.server.BaseHTTPRequestHandler):
    """Answers with the status in the key, or cuts its answer short."""

    def do_GET(self) -> None:
        key = self.path.rpartition("/")[2]
        self.send_response(200 if key == "cut" else int(key))
        self.send_header("Content-Length", "1000" if key == "cut" else "0")
        self.end_headers()
        if key == "cut":
            self.wfile.write(b"x" * 10)
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Misbehaving)) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}/run"
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        ("404", NotFound, "404"),
        ("401", StoreUnsuitable, "credentials"),
        ("403", StoreUnsuitable, "credentials"),
        ("cut", StoreUnavailable, "cut: .*retry"),
        ("503", StoreUnavailable, "503: .*retry"),
    ],
)
def test_what_a_server_answers_becomes_the_error_that_says_what_to_do(server: str, key: str, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        RemoteStore(server).get(key)


def test_plain_http_refuses_at_once_what_it_cannot_do(server: str) -> None:
    store = open_store(server)
    for call in (lambda: store.put("a", b""), lambda: store.put("a", b"", if_absent=True), lambda: store.delete("a"), store.list):
        with pytest.raises(StoreUnsuitable, match=r"read only|cannot be listed"):
            call()


@pytest.mark.timeout(60)
def test_a_server_that_is_not_there_is_unavailable_within_seconds() -> None:
    with pytest.raises(StoreUnavailable, match="retry"):
        open_store("http://127.0.0.1:1/run").get("a")
