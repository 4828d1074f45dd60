"""What ranks decide together: who takes over whose state, when there is a round, and when it is over."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse.errors import FormatError, RoundRefused, TornUpdate, WeightsMismatch
from pulse.torch.loco import meeting
from pulse.torch.loco.meeting import Resync, Stand, Verdict, Vote, Word

A, B, C = (f"{n:032x}" for n in (1, 2, 3))
INSIDE, READY, GUEST, DONE = Stand


def word(round=3, digest=A, stand=READY, **more) -> Word:  # noqa: A002  as the field is called
    plain = {"layout": C, "settings": '{"inner_steps":8}', "whole": True, "steps": 8, "weight": 1.0}
    return Word(**{**plain, "round": round, "digest": digest, "stand": stand, **more})


def words(*stands: Stand, **more) -> list[Word]:
    return [word(stand=stand, steps=0 if stand in {DONE, GUEST} else 8, **more) for stand in stands]


# --- words and votes travel ---


@given(
    st.builds(
        Word, layout=st.just(A), settings=st.text(st.characters(codec="ascii")), round=st.integers(0, 2**60), digest=st.just(B),
        whole=st.booleans(), stand=st.sampled_from(Stand), steps=st.integers(0, 2**40), weight=st.floats(1e-3, 1e8), bad=st.none() | st.just("w"),
        dropped=st.booleans(), payloads=st.lists(st.just("0" * 64)).map(tuple), buffers=st.just(""),
    )
)  # fmt: skip
def test_a_word_arrives_as_it_was_said(word):
    assert Word.from_bytes(word.to_bytes()) == word


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stand", "elsewhere"), ("stand", 3), ("round", -1), ("round", True), ("steps", 1.5), ("weight", 0.0), ("weight", -1.0), ("weight", 1),
        ("weight", 1e9), ("digest", "1"), ("layout", None), ("bad", 3), ("dropped", 1), ("whole", None), ("payloads", "x"), ("payloads", ["x"]),
    ],
)  # fmt: skip
def test_a_word_that_is_none_is_refused(name, value):
    said = json.loads(word().to_bytes())
    broken = json.dumps({**said, name: value}, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(FormatError):
        Word.from_bytes(broken)
    for data in (b"", b"{}", word().to_bytes()[:-1], json.dumps({**said, "more": 1}, sort_keys=True, separators=(",", ":")).encode()):
        with pytest.raises(FormatError):
            Word.from_bytes(data)


def test_a_vote_arrives_as_it_was_cast():
    for vote in (Vote(7), Vote(0, "BaseMismatch: …")):
        assert Vote.from_bytes(vote.to_bytes()) == vote
    with pytest.raises(FormatError):
        Vote.from_bytes(b'{"fault":"","nbytes":-1}')


# --- what must be equal ---


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"layout": A}, r"rank 2: other parameters \(names, shapes, order, view\) than the rest"),
        ({"settings": '{"inner_steps":4}'}, "rank 2: other settings than the rest: inner_steps 4 instead of 8"),
        ({"settings": '{"inner_steps":8,"lr":0.5}'}, "rank 2: other settings than the rest: lr 0.5 instead of None"),
        ({"buffers": "x"}, "rank 2: other buffers than the rest"),
    ],
)
def test_a_rank_with_something_else_is_named(odd, says):
    said = [word(), word(), word(**odd), word()]
    with pytest.raises(WeightsMismatch, match=says):
        meeting.check(said)
    meeting.check(said[:2])


def test_the_ones_that_are_odd_are_those_that_fewer_have_and_of_equally_many_those_with_higher_numbers():
    assert meeting.odd_ones("a") == ()
    assert meeting.odd_ones("aaa") == ()
    assert meeting.odd_ones("ab") == (1,)
    assert meeting.odd_ones("baab") == (1, 2)
    assert meeting.odd_ones("abbcb") == (0, 3)


# --- who is right ---


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ([word(), word()], None),
        ([word()], None),
        ([word(), word(digest=B)], Resync(0, (1,))),  # of two, the lower
        ([word(digest=B), word(), word()], Resync(1, (0,))),  # of three, the two
        ([word(digest=B), word(), word(), word(digest=C)], Resync(1, (0, 3))),
        ([word(round=2, digest=B), word(), word(round=2, digest=B)], Resync(1, (0, 2))),  # the newest round, however few
        ([word(round=0, digest=B), word(round=0, digest=B), word(round=1)], Resync(2, (0, 1))),  # so fresh ranks never win
        ([word(round=0, digest=B, steps=0), word(round=0, steps=8)], Resync(1, (0,))),  # nor in the first window
        ([word(whole=False), word()], Resync(1, (0,))),  # nor does an anchor that is not what it was
        ([word(whole=False), word(whole=False), word(digest=B)], Resync(2, (0, 1))),
        ([word(round=9, whole=False), word(round=2)], Resync(1, (0,))),
        ([word(round=2), word()], Resync(1, (0,))),  # the same weights, but a round behind: its momentum is
    ],
)
def test_the_newest_round_is_right_and_in_it_what_most_have(said, wanted):
    assert meeting.resync(said) == wanted


def test_if_no_anchor_is_whole_all_ranks_stop():
    with pytest.raises(TornUpdate, match="load a saved state"):
        meeting.resync([word(whole=False), word(whole=False)])


SAID = st.builds(
    word, round=st.integers(0, 2), digest=st.sampled_from((A, B, C)), steps=st.integers(0, 2), whole=st.sampled_from((True, True, False))
)


@given(st.lists(SAID, min_size=1, max_size=6))
def test_whoever_differs_takes_over_and_then_nobody_differs(said):
    if not any(one.whole for one in said):
        return
    found = meeting.resync(said)
    if found is None:
        assert len({(one.round, one.digest, one.whole) for one in said}) == 1
        return
    right = said[found.source]
    assert right.whole
    assert right.round == max(one.round for one in said if one.whole)
    assert found.source not in found.ranks
    after = [word(round=right.round, digest=right.digest) if rank in found.ranks else one for rank, one in enumerate(said)]
    assert meeting.resync(after) is None
    assert all(one.whole for one in after)


# --- what follows ---


@pytest.mark.parametrize(
    ("stands", "wanted"),
    [
        ((READY, READY), Verdict.ROUND),
        ((READY,), Verdict.ROUND),
        ((READY, GUEST), Verdict.ROUND),
        ((READY, DONE), Verdict.ROUND),
        ((READY, INSIDE), Verdict.WAIT),
        ((INSIDE, INSIDE), Verdict.WAIT),
        ((INSIDE, GUEST), Verdict.WAIT),
        ((DONE, INSIDE), Verdict.WAIT),
        ((DONE, GUEST), Verdict.WAIT),
        ((DONE, DONE), Verdict.OVER),
        ((DONE,), Verdict.OVER),
    ],
)
def test_there_is_a_round_when_nobody_is_inside_a_window_and_somebody_has_something_to_say(stands, wanted):
    for order in itertools.permutations(stands):
        assert meeting.verdict(words(*order)) is wanted


def test_a_rank_without_more_data_still_has_its_last_steps_to_say():
    said = [word(stand=DONE, steps=0), word(stand=DONE, steps=3)]
    assert meeting.verdict(said) is Verdict.ROUND
    assert meeting.verdict([*said, word(stand=GUEST, steps=0)]) is Verdict.ROUND


def test_a_pseudo_gradient_that_is_not_finite_is_refused_by_name_once_there_would_be_a_round():
    said = [word(), word(bad="layer.weight"), word(), word(bad="head")]
    with pytest.raises(RoundRefused, match=r"rank 1: layer.weight, rank 3: head.*nothing has changed") as caught:
        meeting.verdict(said)
    assert caught.value.ranks == (1, 3)
    assert meeting.verdict([*said, word(stand=INSIDE)]) is Verdict.WAIT


@given(st.lists(st.tuples(st.sampled_from(Stand), st.integers(0, 1)), min_size=1, max_size=5))
def test_nobody_waits_for_ever(stands):
    """While there is no round, somebody goes on with inner steps, and those who stay wait for those; or it is over for all."""
    said = [word(stand=stand, steps=steps) for stand, steps in stands]
    what = meeting.verdict(said)
    leave = [meeting.trains_on(one.stand, said) for one in said]
    if what is Verdict.WAIT:
        assert any(leave)
        assert all(not left for one, left in zip(said, leave, strict=True) if one.stand in {READY, DONE})
    if what is Verdict.OVER:
        assert {one.stand for one in said} == {DONE}
    if what is Verdict.ROUND:
        assert INSIDE not in {one.stand for one in said}
