"""`OuterCallback` in real `transformers.Trainer`s on a small real architecture: two trainers, in threads."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pulse import Subscriber
from pulse.errors import FileError
from pulse.exchange import MemoryExchange
from pulse.integrations.transformers import OuterCallback, PublishCallback
from pulse.store import MemoryStore
from pulse.torch import ModuleWeights

SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZE, num_key_value_heads=1, tie_word_embeddings=True))


def trainer(folder, weights, callbacks, steps, save="no", **more) -> Trainer:
    policy = model()
    policy.load_state_dict(weights)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 12), generator=torch.Generator().manual_seed(0)).tolist()]
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-4, logging_steps=1,
        save_strategy=save, save_steps=3, report_to="none", disable_tqdm=True, dataloader_pin_memory=False, lr_scheduler_type="constant",
        **more,
    )  # fmt: skip
    return Trainer(model=policy, args=arguments, train_dataset=rows, callbacks=callbacks)


def test_two_trainers_end_with_the_same_weights_and_a_worker_follows_them(tmp_path):
    weights, store = model().state_dict(), MemoryStore()
    callbacks = [OuterCallback(exchange, inner_steps=2) for exchange in MemoryExchange.group(2)]
    beside = [[PublishCallback(store, every=2)], []]
    runs = [trainer(tmp_path / str(i), weights, [callbacks[i], *beside[i]], 5) for i in range(2)]
    threads = [threading.Thread(target=run.train) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for callback in callbacks:
        assert [report.round for report in callback.reports] == [1, 2, 3]  # the last one for the fifth step
        assert all(not report.differing for report in callback.reports)
    assert callbacks[0].outer.digest == callbacks[1].outer.digest
    first, second = (run.model.state_dict() for run in runs)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    policy = model().to(torch.bfloat16)
    subscriber = Subscriber(store, ModuleWeights(policy))
    subscriber.apply(subscriber.fetch())
    anchor = callbacks[0].outer.anchor
    assert all(torch.equal(tensor, anchor[name].to(torch.bfloat16)) for name, tensor in policy.named_parameters())


def test_what_a_round_took_stands_in_the_log(tmp_path):
    run = trainer(tmp_path, model().state_dict(), [OuterCallback(MemoryExchange.group(1)[0], inner_steps=2)], 4)
    run.train()
    logged = [entry for entry in run.state.log_history if "loco/round" in entry]
    assert [entry["loco/round"] for entry in logged] == [1, 2]
    assert all({"loco/density", "loco/payload_bytes", "loco/view_changed", "loco/seconds"} <= set(entry) for entry in logged)


def test_a_resumed_trainer_goes_on_in_the_middle_of_a_window_as_if_nothing_had_been(tmp_path):
    weights = model().state_dict()
    whole = OuterCallback(MemoryExchange.group(1)[0], inner_steps=2)
    trainer(tmp_path / "whole", weights, [whole], 6, data_seed=1).train()
    trainer(tmp_path / "parts", weights, [OuterCallback(MemoryExchange.group(1)[0], inner_steps=2)], 3, "steps", data_seed=1).train()
    again = OuterCallback(MemoryExchange.group(1)[0], inner_steps=2)
    trainer(tmp_path / "parts", weights, [again], 6, data_seed=1).train(resume_from_checkpoint=True)
    assert [report.round for report in again.reports] == [2, 3]
    assert again.outer.digest == whole.outer.digest


def test_a_checkpoint_without_the_rounds_state_is_refused(tmp_path):
    weights = model().state_dict()
    trainer(tmp_path, weights, [], 3, "steps").train()
    run = trainer(tmp_path, weights, [OuterCallback(MemoryExchange.group(1)[0], inner_steps=2)], 6)
    with pytest.raises(FileError, match="outer.pt"):
        run.train(resume_from_checkpoint=True)


def test_a_round_between_steps_that_share_rollouts_is_refused(tmp_path):
    run = trainer(tmp_path, model().state_dict(), [OuterCallback(MemoryExchange.group(1)[0], inner_steps=3)], 6)
    run.args.steps_per_generation, run.args.num_iterations = 2, 1
    with pytest.raises(ValueError, match="rollouts serve 2 optimizer steps"):
        run.train()
