"""What users get for the mistakes that users make: an error that says what to do instead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pulse
from pulse.errors import ChainError, WeightsMismatch
from pulse.store import MemoryStore
from pulse.torch import ModuleWeights
from pulse.versions import Versions

WEIGHTS = {"w": np.arange(4, dtype=np.float32)}


@pytest.mark.parametrize("end", [pulse.Publisher, pulse.Subscriber])
@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), WEIGHTS])
def test_a_module_or_a_mapping_is_no_weights(end, thing):
    with pytest.raises(TypeError, match="ModuleWeights"):
        end(MemoryStore(), thing)


def test_a_store_may_be_named_by_its_address(tmp_path):
    pulse.Publisher(str(tmp_path / "store"), pulse.MemoryWeights(WEIGHTS)).publish()
    assert pulse.Subscriber(tmp_path / "store", pulse.MemoryWeights(WEIGHTS)).fetch() is not None


def test_an_unknown_encoding_is_refused_at_once():
    with pytest.raises(ValueError, match="known are contextual, portable, absolute and auto"):
        pulse.Publisher(MemoryStore(), pulse.MemoryWeights(WEIGHTS), encoding="x")


def test_a_publisher_that_is_closed_says_so():
    publisher = pulse.Publisher(MemoryStore(), pulse.MemoryWeights(WEIGHTS))
    publisher.close()
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        publisher.publish()


def test_applying_nothing_says_why_there_is_nothing():
    with pytest.raises(TypeError, match="nothing newer"):
        pulse.Subscriber(MemoryStore(), pulse.MemoryWeights(WEIGHTS)).apply(None)


def test_versions_below_zero_are_refused():
    with pytest.raises(ValueError, match="count from 0"):
        pulse.Subscriber(MemoryStore(), pulse.MemoryWeights(WEIGHTS)).fetch(-1)


def test_a_view_is_a_torch_dtype_and_weights_are_a_module():
    for view in ("bfloat16", {"*": "bfloat16"}):
        with pytest.raises(TypeError, match="torch.bfloat16"):
            ModuleWeights(torch.nn.Linear(2, 2), view=view)
    with pytest.raises(TypeError, match="MemoryWeights"):
        ModuleWeights(torch.nn.Linear(2, 2).state_dict())


def test_a_receiver_that_cannot_be_written_is_refused_before_anything_is_downloaded():
    store = MemoryStore()
    pulse.Publisher(store, ModuleWeights(torch.nn.Linear(2, 2), view=torch.bfloat16)).publish()
    viewed = pulse.Subscriber(store, ModuleWeights(torch.nn.Linear(2, 2), view=torch.bfloat16))
    with pytest.raises(WeightsMismatch, match="receive without view="):
        viewed.fetch()
    module = torch.nn.Linear(2, 2).to(torch.bfloat16)
    module.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16).expand(2))
    with pytest.raises(WeightsMismatch, match="clone it first"):
        pulse.Subscriber(store, ModuleWeights(module)).fetch()


def test_swapped_or_undecoded_arguments_are_named():
    patch = pulse.diff(WEIGHTS, WEIGHTS)
    with pytest.raises(TypeError, match="wants a Patch first"):
        pulse.apply(WEIGHTS, patch)
    with pytest.raises(TypeError, match="decoded"):
        pulse.apply(b"bytes", WEIGHTS)
    with pytest.raises(TypeError, match="state_dict"):
        pulse.diff(torch.nn.Linear(2, 2), WEIGHTS)
    with pytest.raises(TypeError, match="a Patch is wanted"):
        pulse.encode(b"bytes")


@pytest.mark.parametrize("name", [7, "half \ud800"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(TypeError, match="not a tensor's name"):
        pulse.digest_of({name: np.zeros(1)})


def test_digest_of_takes_whatever_diff_takes():
    tensor = torch.arange(4, dtype=torch.float32)
    assert pulse.digest_of({"w": tensor}) == pulse.digest_of(WEIGHTS) == pulse.diff(WEIGHTS, WEIGHTS).base


def test_a_store_that_lost_its_chain_stops_the_publisher_instead_of_growing_a_chain_without_a_start():
    store = MemoryStore()
    publisher = pulse.Publisher(store, pulse.MemoryWeights(WEIGHTS))
    publisher.publish()
    for key in store.list():
        store.delete(key)
    with pytest.raises(ChainError, match="emptied or replaced"):
        publisher.publish()
    assert not any(key.startswith("manifests/") for key in store.list())


def test_one_path_of_files_need_not_be_a_list(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    store = MemoryStore()
    pulse.Publisher(store, pulse.MemoryWeights(WEIGHTS), files=tmp_path / "config.json").publish()
    manifest = Versions(store).manifest(0)
    assert [file.name for file in manifest.anchor.files] == ["config.json"]


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.eye(2).to_sparse()])
def test_a_tensor_without_plain_bits_is_refused_in_our_words(tensor):
    with pytest.raises(WeightsMismatch, match="no plain bits"):
        pulse.diff({"w": torch.zeros(2)}, {"w": tensor})
