"""What a trainer wants of the workers: rollouts for its prompts, scored and recorded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from demo.events import EventLog
from demo.messages import Reply, Request
from demo.rollouts import RolloutServer
from demo.settings import Settings
from demo.task import Problem, Split, end_tokens, prompt_tokens, reward

_REPLY_SECONDS = 150.0
_SEEDS = 1 << 43  # a worker multiplies them by about a million, and generators take 63 bits


@dataclass(frozen=True)
class Moment:
    """Where training is: the step, the newest version, and when the step that made it ended."""

    step: int
    version: int
    stepped_at: float


class Asker:
    """Asks for rollouts by the newest version, over a `RolloutServer` of its own."""

    def __init__(self, settings: Settings, tokenizer: Any, log: EventLog) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens(tokenizer)
        self._log = log
        self._problems: dict[str, Problem] = {}
        self._request = 0
        self._records = (settings.folder / "rollouts.jsonl").open("a", encoding="utf-8")
        self.server = RolloutServer(
            os.environ["DEMO_TOKEN"], _REPLY_SECONDS, settings.stall_seconds, lambda lost: log.write("lost", **vars(lost))
        )

    def know(self, problem_list: Iterable[Problem]) -> None:
        """Remember which question has which answer."""
        self._problems.update({problem.question: problem for problem in problem_list})

    def rollouts(self, prompts: list[str], now: Moment, meanwhile: Callable[[], None]) -> dict[str, Any]:
        """What TRL wants of a `rollout_func`: one request per group of equal prompts; the rows come back in TRL's order."""
        questions = prompts[:: self._settings.samples_per_prompt]
        replies, rewards = self.ask("train", questions, now, meanwhile)
        groups = [[self._prompt(question)] * self._settings.samples_per_prompt for question in questions]
        return {
            "prompt_ids": [prompt for group in groups for prompt in group],
            "completion_ids": [tokens for reply in replies for tokens in reply.tokens],
            "logprobs": [logprobs for reply in replies for logprobs in reply.logprobs],
            "scored": [value for group in rewards for value in group],
        }

    def ask(self, split: Split, questions: list[str], now: Moment, meanwhile: Callable[[], None]) -> tuple[list[Reply], list[list[float]]]:
        """The replies to these questions and their rewards. `meanwhile` is called while the workers generate."""
        requests = [self._new_request(split, index, question, now) for index, question in enumerate(questions)]
        self._log.write("asked", split=split, step=now.step, version=now.version, requests=len(requests))
        started = time.perf_counter()
        self.server.submit(requests)
        meanwhile()
        replies = self.server.collect(requests)
        seconds = time.perf_counter() - started
        rewards = [self._score(question, reply) for question, reply in zip(questions, replies, strict=True)]
        for request, reply, values in zip(requests, replies, rewards, strict=True):
            record = {"split": split, "step": now.step, "prompt": request.prompt, **vars(reply), "rewards": values}
            self._records.write(json.dumps(record) + "\n")
        self._records.flush()
        self._report(split, replies, [value for group in rewards for value in group], now, seconds)
        return replies, rewards

    def finish(self, version: int) -> None:
        """Have every worker reach `version` and hash its weights; then let them go."""
        for finished in self.server.finish(self._settings.workers, version):
            self._log.write("finished", **vars(finished))
        self.server.close()
        self._records.close()

    def _report(self, split: Split, replies: list[Reply], rewards: list[float], now: Moment, seconds: float) -> None:
        lengths = [len(tokens) for reply in replies for tokens in reply.tokens]
        fresh = [reply.first_token_at for reply in replies if reply.version == now.version]
        self._log.write(
            "answered",
            split=split,
            step=now.step,
            version=now.version,
            reward=sum(rewards) / len(rewards),
            seconds=seconds,
            length=sum(lengths) / len(lengths),
            to_first_token=min(fresh) - now.stepped_at if fresh and now.step else None,
            staleness=max(now.version - reply.version for reply in replies),
            by_worker={name: sum(reply.worker == name for reply in replies) for name in {reply.worker for reply in replies}},
            digests=sorted({reply.digest for reply in replies}),
        )

    def _new_request(self, split: Split, index: int, question: str, now: Moment) -> Request:
        self._request += 1
        return Request(
            id=self._request,
            prompt=self._prompt(question),
            samples=self._settings.samples_per_prompt,
            seed=((self._settings.seed * 100_000 + now.step) * 1000 + index + (500 if split == "held-out" else 0)) % _SEEDS,
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            end_tokens=self._end_tokens,
            at_least=now.version,
        )

    def _prompt(self, question: str) -> list[int]:
        return prompt_tokens(self._tokenizer, question)

    def _score(self, question: str, reply: Reply) -> list[float]:
        texts = self._tokenizer.batch_decode(reply.tokens, skip_special_tokens=True)
        return [reward(self._problems[question], completion) for completion in texts]


def scored(**columns: Any) -> list[float]:
    """TRL's reward function: the rewards that were worked out when the rollouts came."""
    rewards: list[float] = columns["scored"]
    return rewards
