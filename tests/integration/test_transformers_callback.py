"""`PublishCallback` in a real `transformers.Trainer` on a small real architecture."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pulse import Subscriber
from pulse.errors import StoreUnavailable
from pulse.integrations.transformers import PublishCallback
from pulse.store import MemoryStore
from pulse.torch import ModuleWeights
from pulse.versions import Versions


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=1, tie_word_embeddings=True))


def trainer(tmp_path, callback: PublishCallback, steps: int) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 12)).tolist()]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-5, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(model=model(0), args=arguments, train_dataset=rows, callbacks=[callback])


def test_every_kth_step_and_the_last_one_are_published_and_a_worker_holds_the_trainers_bits(tmp_path):
    store = MemoryStore()
    callback = PublishCallback(store, every=2)
    run = trainer(tmp_path, callback, 5)
    run.train()
    assert [(receipt.version, receipt.step) for receipt in callback.receipts] == [(0, 0), (1, 2), (2, 4), (3, 5)]
    policy = model(1).to(torch.bfloat16)
    subscriber = Subscriber(store, ModuleWeights(policy))
    subscriber.apply(subscriber.fetch())
    subscriber.verify()
    trained = run.model.state_dict()
    assert all(torch.equal(tensor, trained[name].to(torch.bfloat16)) for name, tensor in policy.state_dict().items())


def test_what_publishing_added_to_the_step_stands_in_the_log(tmp_path):
    run = trainer(tmp_path, PublishCallback(MemoryStore()), 3)
    run.train()
    steps = [entry for entry in run.state.log_history if "loss" in entry]
    assert all(
        {"pulse/step_seconds", "pulse/wait_seconds", "pulse/version", "pulse/bytes", "pulse/density"} <= set(entry) for entry in steps
    )


class Away(MemoryStore):
    """A store that is away for the puts whose numbers are given."""

    def __init__(self, away: range) -> None:
        super().__init__()
        self._away, self._puts = away, 0

    def put(self, key, data, *, if_absent=False):
        self._puts += 1
        if self._puts in self._away:
            raise StoreUnavailable("away")
        super().put(key, data, if_absent=if_absent)


def test_a_store_that_is_away_for_a_while_neither_stops_training_nor_loses_a_change(tmp_path):
    store = Away(range(9, 11))
    callback = PublishCallback(store)
    run = trainer(tmp_path, callback, 6)
    run.train()
    assert callback.receipts[-1].step == 6
    assert len(callback.receipts) < 7
    policy = model(1).to(torch.bfloat16)
    subscriber = Subscriber(store, ModuleWeights(policy))
    subscriber.apply(subscriber.fetch())
    assert torch.equal(policy.lm_head.weight, run.model.lm_head.weight.to(torch.bfloat16))


def test_a_store_that_stays_away_stops_training_with_its_own_error(tmp_path):
    with pytest.raises(StoreUnavailable, match="away"):
        trainer(tmp_path, PublishCallback(Away(range(9, 1000)), patience=2), 6).train()


@pytest.mark.parametrize("compress", [False, True])
def test_what_is_pulled_loads_without_anything_else(tmp_path, compress):
    from pulse.follow import pull

    store = MemoryStore()
    run = trainer(tmp_path, PublishCallback(store, compress_anchors=compress), 2)
    run.train()
    assert Versions(store).manifest(0).anchor.compressed == compress
    pull(store, None, tmp_path / "pulled")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "pulled", dtype=torch.bfloat16)
    assert all(torch.equal(tensor, run.model.state_dict()[name].to(torch.bfloat16)) for name, tensor in loaded.state_dict().items())
