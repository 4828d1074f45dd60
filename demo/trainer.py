"""The trainer process: GRPO on the CPU, a version published after every optimizer step, every rollout asked of the workers.

``python -m demo.trainer SETTINGS``; the run's token comes in the environment variable ``DEMO_TOKEN``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from demo.events import EventLog
from demo.grpo import PublishEveryStep, SampledGRPOTrainer, grpo_config
from demo.hashing import masters_sha256, view_sha256
from demo.messages import Reply, Request
from demo.pinned import pin
from demo.processes import die_with_parent, peak_memory
from demo.rollouts import RolloutError, RolloutServer
from demo.settings import Settings
from demo.sync import Sender, SyncError
from demo.task import Problem, end_tokens, problems, prompt_tokens, reward
from demo.ways import open_sender

_REPLY_SECONDS = 150.0
_SEEDS = 1 << 43  # a worker multiplies them by about a million, and generators take 63 bits


class Run:
    """What the trainer does besides training: publish, ask for rollouts, score and record them."""

    def __init__(self, settings: Settings, model: torch.nn.Module, tokenizer: Any, log: EventLog) -> None:
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens(tokenizer)
        self._log = log
        self._sender: Sender = open_sender(settings, model)
        self._problems: dict[str, Problem] = {}
        self._version = 0
        self._step = 0
        self._stepped_at = time.time()
        self._request = 0
        self._hashed = -1
        self._records = (settings.folder / "rollouts.jsonl").open("a", encoding="utf-8")
        self.grpo: SampledGRPOTrainer | None = None
        self.server = RolloutServer(
            os.environ["DEMO_TOKEN"], _REPLY_SECONDS, settings.stall_seconds, lambda lost: log.write("lost", **vars(lost))
        )

    def know(self, problem_list: list[Problem]) -> None:
        """Remember which question has which answer."""
        self._problems.update({problem.question: problem for problem in problem_list})

    def publish(self, step: int, stepped_at: float) -> None:
        """Make the weights of this step a version."""
        if self.grpo is not None and step > 0:
            losses, mismatch = self.grpo.take_losses()
            masters = masters_sha256(self._model) if self._settings.record_masters else None
            self._log.write("step", step=step, losses=losses, mismatch=mismatch, masters=masters, stepped_at=stepped_at)
        started = time.perf_counter()
        sent = self._sender.publish(step)
        seconds = time.perf_counter() - started
        self._step, self._version, self._stepped_at = step, sent.version, stepped_at
        self._log.write("published", step=step, seconds=seconds, stepped_at=stepped_at, **vars(sent))

    def rollouts(self, prompts: list[str], _trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: one request per group of equal prompts; the rows come back in TRL's order."""
        questions = prompts[:: self._settings.samples_per_prompt]
        replies, rewards = self._ask("train", questions)
        groups = [[self._prompt(question)] * self._settings.samples_per_prompt for question in questions]
        return {
            "prompt_ids": [prompt for group in groups for prompt in group],
            "completion_ids": [tokens for reply in replies for tokens in reply.tokens],
            "logprobs": [logprobs for reply in replies for logprobs in reply.logprobs],
            "scored": [value for group in rewards for value in group],
        }

    def evaluate(self) -> None:
        """The share of right answers on held-out problems, with the newest version."""
        held_out = problems(self._settings.seed, self._settings.held_out, "held-out")
        self.know(held_out)
        if held_out:
            self._ask("held-out", [problem.question for problem in held_out])

    def finish(self) -> None:
        """Hash the last version here and in every worker, and let the workers go."""
        self._hash_once()
        for finished in self.server.finish(self._settings.workers, self._version):
            self._log.write("finished", **vars(finished))
        self.server.close()
        self._sender.close()
        self._records.close()

    def _ask(self, split: str, questions: list[str]) -> tuple[list[Reply], list[list[float]]]:
        requests = [self._new_request(split, index, question) for index, question in enumerate(questions)]
        self._log.write("asked", split=split, step=self._step, version=self._version, requests=len(requests))
        started = time.perf_counter()
        self.server.submit(requests)
        self._hash_once()
        replies = self.server.collect(requests)
        seconds = time.perf_counter() - started
        rewards = [self._score(question, reply) for question, reply in zip(questions, replies, strict=True)]
        for request, reply, values in zip(requests, replies, rewards, strict=True):
            record = {"split": split, "step": self._step, "prompt": request.prompt, **vars(reply), "rewards": values}
            self._records.write(json.dumps(record) + "\n")
        self._records.flush()
        self._report(split, replies, [value for group in rewards for value in group], seconds)
        return replies, rewards

    def _report(self, split: str, replies: list[Reply], rewards: list[float], seconds: float) -> None:
        lengths = [len(tokens) for reply in replies for tokens in reply.tokens]
        fresh = [reply.first_token_at for reply in replies if reply.version == self._version]
        self._log.write(
            "answered",
            split=split,
            step=self._step,
            version=self._version,
            reward=sum(rewards) / len(rewards),
            seconds=seconds,
            length=sum(lengths) / len(lengths),
            to_first_token=min(fresh) - self._stepped_at if fresh and self._step else None,
            staleness=max(self._version - reply.version for reply in replies),
            by_worker={name: sum(reply.worker == name for reply in replies) for name in {reply.worker for reply in replies}},
            digests=sorted({reply.digest for reply in replies}),
        )

    def _new_request(self, split: str, index: int, question: str) -> Request:
        self._request += 1
        return Request(
            id=self._request,
            prompt=self._prompt(question),
            samples=self._settings.samples_per_prompt,
            seed=((self._settings.seed * 100_000 + self._step) * 1000 + index + (500 if split == "held-out" else 0)) % _SEEDS,
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            end_tokens=self._end_tokens,
            at_least=self._version,
        )

    def _prompt(self, question: str) -> list[int]:
        return prompt_tokens(self._tokenizer, question)

    def _score(self, question: str, reply: Reply) -> list[float]:
        texts = self._tokenizer.batch_decode(reply.tokens, skip_special_tokens=True)
        return [reward(self._problems[question], completion) for completion in texts]

    def _hash_once(self) -> None:
        """The SHA-256 of the newest view, taken while the workers generate."""
        if self._hashed != self._version:
            self._hashed = self._version
            self._log.write("hashed", version=self._version, sha256=view_sha256(self._model))


def scored(**columns: Any) -> list[float]:
    """TRL's reward function: the rewards that were worked out when the rollouts came."""
    rewards: list[float] = columns["scored"]
    return rewards


def train(settings: Settings, log: EventLog) -> None:
    """The whole run."""
    set_seed(settings.seed)
    pin(settings.trainer_threads)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    run = Run(settings, model, tokenizer, log)
    training = problems(settings.seed, settings.prompts_per_step, "train")
    run.know(training)
    grpo = SampledGRPOTrainer(
        model=model,
        reward_funcs=[scored],
        args=grpo_config(settings),
        train_dataset=Dataset.from_list([{"prompt": problem.question} for problem in training] * settings.steps),
        processing_class=tokenizer,
        rollout_func=run.rollouts,
        callbacks=[PublishEveryStep(run.publish)],
    )
    run.grpo = grpo
    run.publish(0, time.time())  # first: whoever comes finds this run in the store, and not one that was there before
    log.write("listening", address=run.server.address, pid=os.getpid())
    run.evaluate()
    grpo.train()
    run.evaluate()
    run.finish()
    log.write("done", peak_memory=peak_memory())


def main(arguments: list[str]) -> int:
    """Run the trainer that the settings describe."""
    die_with_parent()
    settings = Settings.load(Path(arguments[0]))
    log = EventLog(settings.folder / "events" / "trainer.jsonl", "trainer")
    try:
        train(settings, log)
    except (RolloutError, SyncError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
