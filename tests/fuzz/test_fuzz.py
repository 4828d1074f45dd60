"""A few seconds of the fuzzer in every run of the tests; `make fuzz` runs it for longer."""

import random

import pytest

from pulse.codec import ranks
from pulse.errors import DigestMismatch
from tests.fuzz import mutations, oracle, samples
from tests.fuzz.fuzz import Fuzzer


@pytest.fixture(scope="module")
def fuzzer():
    return Fuzzer(seed=1)


def test_spoiled_bytes_are_refused_in_our_own_words_or_are_sound(fuzzer, tmp_path):
    outcomes = fuzzer.run_all(range(500), tmp_path)  # some seconds
    assert outcomes["decoded"] < 250
    assert {"FormatError", "DigestMismatch", "BaseMismatch", "decoded"} <= set(outcomes)


def test_the_same_seed_and_number_make_the_same_case(fuzzer):
    twin = Fuzzer(seed=1)
    assert [fuzzer.case(number)[0] for number in range(40)] == [twin.case(number)[0] for number in range(40)]
    assert [fuzzer.case(number)[0] for number in range(40)] != [Fuzzer(seed=2).case(number)[0] for number in range(40)]


def test_a_case_that_fails_is_kept_with_how_to_repeat_it(fuzzer, tmp_path, monkeypatch):
    monkeypatch.setattr(oracle, "REFUSALS", (DigestMismatch,))  # a reader that must not refuse anything else
    with pytest.raises(Exception, match=".") as caught:
        fuzzer.run_all(range(60), tmp_path)
    (kept,) = tmp_path.iterdir()
    number = int(kept.stem.split("-")[2])
    assert kept.read_bytes() == fuzzer.case(number)[0]
    assert f"--seed 1 --case {number}" in caught.value.__notes__[0]


def test_the_samples_are_honest_and_have_blocks_of_ranks_and_of_gaps():
    kinds, most = set(), 0
    for sample in samples.patches():
        assert oracle.patch_outcome(sample) == "decoded"
        header = oracle.codec.inspect(sample.blob)
        kinds |= {(header.encoding, bool(steps)) for number, _, steps in header.blocks if number}
        most = max([most, *(number for number, _, steps in header.blocks if not steps)])
    assert most > ranks._AT_ONCE  # through the kernels
    assert kinds == {("contextual", False), ("contextual", True), ("portable", True), ("absolute", True)}
    for sample in samples.payloads():
        assert oracle.payload_outcome(sample) == "decoded"
    assert {oracle.payload.read(sample.blob)[0].value_dtype for sample in samples.payloads()} == set(oracle.payload.DIGITS)
    for data, read in samples.documents():
        assert oracle.document_outcome(data, read) == "decoded"


def test_every_kind_of_mutation_changes_something(fuzzer):
    rng = random.Random(0)
    for kind in mutations.KINDS:
        for pool in (fuzzer.patches[:12], fuzzer.payloads):
            changed = [kind(rng, sample, fuzzer.patches[-1]) != sample for sample in pool]
            assert any(changed), kind.__name__
