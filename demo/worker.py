"""An inference worker. It is started with its settings, and shares nothing with the trainer but the store and a socket.

Its weights start as NaN: every one that it ever computes with has come out of the store, and so has the model's config. What it writes into
the run's folder, events and a log, is for the report. ``python -m demo.worker SETTINGS NAME
ADDRESS``; the run's token comes in the environment variable ``DEMO_TOKEN``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from demo.events import EventLog
from demo.hashing import named_weights, view_sha256
from demo.messages import Finished, Reply, Request
from demo.pinned import pin
from demo.processes import die_with_parent, peak_memory
from demo.sampling import Sampling, sample
from demo.settings import Settings
from demo.sync import Receiver, SyncError, catch_up
from demo.ways import architecture, open_receiver
from demo.wire import Connection, Malformed, WireError

POLL_SECONDS = 0.05
_IDLE_SECONDS = 1.0
_SYNC_SECONDS = 120.0


def empty_policy(model: str | Path) -> PreTrainedModel:
    """The model's architecture in BF16, every weight NaN."""
    policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for _, tensor in named_weights(policy):
            tensor.fill_(float("nan"))
    return policy


class Worker:
    """Answers requests with the version it holds, and follows the store in between."""

    def __init__(self, name: str, policy: PreTrainedModel, receiver: Receiver, log: EventLog) -> None:
        self._name = name
        self._policy = policy
        self._receiver = receiver
        self._log = log
        self._hashed: tuple[int | None, str] = (None, "")
        self._busy_until = time.monotonic()

    def serve(self, connection: Connection) -> None:
        """Work until the trainer says that it is over."""
        while True:
            if not connection.poll(POLL_SECONDS):
                self.while_idle()
            elif self.answer(connection):
                return

    def answer(self, connection: Connection) -> bool:
        """Do what the trainer at the other end asks next; whether that was the last it wanted."""
        message = connection.receive(timeout=30.0)
        if message.get("type") == "finish":
            connection.send(self._finish(int(message["at_least"])).message())
            return True
        if message.get("type") != "generate":
            raise Malformed(f"the trainer sent {message.get('type')!r}")
        connection.send(self._generate(Request.parse(message)).message())
        self._busy_until = time.monotonic()
        return False

    def while_idle(self) -> None:
        """Hash the live weights once nothing has happened for a while; only then look for a newer version."""
        if self._receiver.version == self._hashed[0]:
            self.follow()
        elif time.monotonic() - self._busy_until > _IDLE_SECONDS:
            self._hash()

    def follow(self, at_least: int | None = None) -> None:
        """Take what is new; with `at_least`, wait until it is there."""
        if at_least is None:
            update = self._receiver.advance(0.0)
            updates = [] if update is None else [update]
        else:
            self._hash()
            updates = catch_up(self._receiver, at_least, _SYNC_SECONDS)
        for update in updates:
            self._log.write("applied", **vars(update))
            self._busy_until = time.monotonic()

    def _generate(self, request: Request) -> Reply:
        if self._receiver.version is None or self._receiver.version < request.at_least:
            self.follow(request.at_least)
        sampling = Sampling(request.samples, request.max_tokens, request.temperature)
        samples = sample(self._policy, request.prompt, request.seed, sampling, frozenset(request.end_tokens))
        version = self._receiver.version
        assert version is not None  # `follow` saw to it
        return Reply(
            id=request.id,
            worker=self._name,
            version=version,
            digest=self._receiver.digest,
            tokens=samples.tokens,
            logprobs=samples.logprobs,
            first_token_at=samples.first_token_at,
        )

    def _hash(self) -> str:
        version = self._receiver.version
        if version is not None and self._hashed[0] != version:
            self._hashed = (version, view_sha256(self._policy))
            self._log.write("hashed", version=version, digest=self._receiver.digest, sha256=self._hashed[1])
        return self._hashed[1]

    def _finish(self, at_least: int) -> Finished:
        if self._receiver.version is None or self._receiver.version < at_least:
            self.follow(at_least)
        sha256 = self._hash()
        version = self._receiver.version
        assert version is not None
        return Finished(self._name, version, self._receiver.digest, sha256)


def main(arguments: list[str]) -> int:
    """Run one worker until the trainer lets it go."""
    die_with_parent()
    settings, name, address = Settings.load(Path(arguments[0])), arguments[1], arguments[2]
    log = EventLog(settings.folder / "events" / f"{name}.jsonl", name)
    log.write("started", pid=os.getpid())
    pin(threads=1)
    try:
        policy = empty_policy(architecture(settings))
        worker = Worker(name, policy, open_receiver(settings, policy), log)
        worker.follow()
        with Connection.dial(address, timeout=10.0) as connection:
            connection.send({"type": "hello", "worker": name, "token": os.environ["DEMO_TOKEN"]})
            log.write("connected")
            worker.serve(connection)
    except (WireError, ConnectionError) as error:
        print(f"error: lost the trainer: {error}", file=sys.stderr)
        return 1
    except SyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    log.write("done", peak_memory=peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
