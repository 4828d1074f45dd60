"""Both ways that weights travel, behind one interface: bit for bit, NaN first."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from demo.hashing import masters_sha256, view_sha256
from demo.settings import Settings
from demo.sync import SyncError, catch_up
from demo.ways import open_receiver, open_sender
from demo.worker import empty_policy
from tests.demo.conftest import tiny_config


@pytest.fixture(params=["patch", "checkpoint"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    tiny_config().save_pretrained(tmp_path / "model")
    found = Settings(run=str(tmp_path), model=str(tmp_path / "model"), store=str(tmp_path / "store"))
    return replace(found, sync=request.param)


def test_a_worker_holds_the_trainers_bits(settings: Settings, tiny: LlamaForCausalLM) -> None:
    sender = open_sender(settings, tiny)
    policy = empty_policy(settings.model)
    assert all(bool(parameter.isnan().all()) for parameter in policy.parameters())
    receiver = open_receiver(settings, policy)
    assert receiver.advance(0.0) is None
    for step in range(4):
        sent = sender.publish(step)
        received = catch_up(receiver, sent.version, 20.0)
        assert (received[-1].version, received[-1].digest) == (sent.version, sent.digest)
        assert view_sha256(policy) == view_sha256(tiny)
        with torch.no_grad():
            for parameter in tiny.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    assert view_sha256(policy) != view_sha256(tiny)
    sender.close()


def test_a_late_worker_catches_up(settings: Settings, tiny: LlamaForCausalLM) -> None:
    sender = open_sender(settings, tiny)
    for step in range(3):
        sent = sender.publish(step)
        with torch.no_grad():
            tiny.lm_head.weight.mul_(1.01)
    policy = empty_policy(settings.model)
    receiver = open_receiver(settings, policy)
    received = catch_up(receiver, sent.version, 20.0)
    assert (received[0].base, received[-1].version, receiver.digest) == (None, sent.version, sent.digest)
    sender.close()


def test_a_version_that_does_not_come_is_an_error(settings: Settings, tiny: LlamaForCausalLM) -> None:
    sender = open_sender(settings, tiny)
    sent = sender.publish(0)
    receiver = open_receiver(settings, empty_policy(settings.model))
    with pytest.raises(SyncError, match="did not come"):
        catch_up(receiver, sent.version + 1, 0.5)
    sender.close()


def test_the_view_and_the_masters_are_hashed_apart(tiny: LlamaForCausalLM) -> None:
    tiny.to(torch.bfloat16).to(torch.float32)
    view, masters = view_sha256(tiny), masters_sha256(tiny)
    with torch.no_grad():
        tiny.lm_head.weight.mul_(1 + 2.0**-20)
    assert view_sha256(tiny) == view
    assert masters_sha256(tiny) != masters
    assert view_sha256(tiny.to(torch.bfloat16)) == view
