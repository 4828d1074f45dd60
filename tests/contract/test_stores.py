"""Every store that is shipped keeps the contract. A store of one's own needs the same few lines."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import obstore.store
import pytest

from pulse.store import LocalStore, MemoryStore, ObjectStore
from pulse.store.remote import RemoteStore
from pulse.testing.faults import FaultyStore
from pulse.testing.store import Filled, ReadContract, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore()


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "deep" / "store")


class TestRemoteStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return RemoteStore("memory:///", client=obstore.store.MemoryStore())


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return FaultyStore(MemoryStore())


class TestPlainHttp(ReadContract):
    @pytest.fixture
    def filled(self, tmp_path: Path) -> Iterator[Filled]:
        handler = functools.partial(Quiet, directory=str(tmp_path))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()

            def fill(objects: Mapping[str, bytes]) -> ObjectStore:
                for key, data in objects.items():
                    LocalStore(tmp_path).put(key, data)
                return RemoteStore(f"http://127.0.0.1:{server.server_port}")

            yield fill
            server.shutdown()
            thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Python's own file server: it knows neither ranges nor conditions."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""
