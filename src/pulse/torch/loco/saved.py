"""A rank's state as a dictionary to save, and as bytes for a rank that takes it over."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pulse.errors import DigestMismatch, FormatError, UnsupportedFormat, WeightsMismatch
from pulse.torch.loco.layout import Layout
from pulse.torch.loco.rounds import State

SCHEMA = 1


def to_dict(state: State, layout: Layout, made_by: Mapping[str, str], digest: str, steps: int) -> dict[str, Any]:
    """Everything that the next round depends on, besides the local weights and what is the inner optimizer's. Copies, FP32 as they are.

    made_by: what must be the same when it is loaded, such as the method.
    """
    return {
        "schema": SCHEMA,
        "layout": layout.fingerprint,
        "made_by": dict(made_by),
        "round": state.round,
        "steps": steps,
        "digest": digest,
        "anchor": _named(layout, state.anchor),
        "outer": state.outer.state_dict(),
        "feedback": None if state.feedback is None else _named(layout, state.feedback),
        "age": None if state.age is None else _named(layout, state.age),
    }


def _named(layout: Layout, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    rows = zip(layout.names, tensors, layout.shapes, strict=True)
    return {name: tensor.detach().clone().view(shape) for name, tensor, shape in rows}


def load(state: State, layout: Layout, made_by: Mapping[str, str], saved: Mapping[str, Any]) -> int:
    """Go on from `saved`, which is left as it is; returns the inner steps since the round. Checked before anything is written.

    Raises `UnsupportedFormat` for another schema, `WeightsMismatch` for other parameters, another method or outer optimizer, or tensors
    that are no longer FP32, and `DigestMismatch` for an anchor that is not the one that was saved.
    """
    if saved.get("schema") != SCHEMA:
        raise UnsupportedFormat(f"a saved state of schema {saved.get('schema')!r}; this version knows {SCHEMA}")
    if saved["layout"] != layout.fingerprint:
        raise WeightsMismatch("the saved state is of other parameters: names, shapes, order or view differ")
    for what, mine in made_by.items():
        if saved["made_by"].get(what) != mine:
            raise WeightsMismatch(f"the saved state is of {what} {saved['made_by'].get(what)}, and this is {mine}")
    for name, tensor in _tensors({key: saved[key] for key in ("anchor", "outer", "feedback")}):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise WeightsMismatch(f"the saved state's {name} is {tensor.dtype}: it was FP32 when it was saved")
    anchor = [saved["anchor"][name].view(-1) for name in layout.names]
    if (found := layout.digest(anchor)) != saved["digest"]:
        raise DigestMismatch(f"the saved anchor: expected digest {saved['digest']}, found {found}")
    _write(state.anchor, anchor)
    for own, theirs in ((state.feedback, saved["feedback"]), (state.age, saved["age"])):
        for tensor, name in zip(own or [], layout.names, strict=False):
            tensor.copy_(theirs[name].view(-1)) if theirs is not None else tensor.zero_()
    state.outer.load_state_dict(saved["outer"])
    state.round = saved["round"]
    return int(saved["steps"])


def _tensors(value: Any, name: str = "state") -> Iterator[tuple[str, Tensor]]:
    """All tensors within dictionaries and lists, and where they are."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(part, str(key) if name == "state" else f"{name}.{key}")


def _write(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def pack(state: State) -> bytes:
    """What another rank takes over: anchor, outer state and round. Never error feedback, which is each rank's own."""
    out = io.BytesIO()
    torch.save({"round": state.round, "anchor": [tensor.cpu() for tensor in state.anchor], "outer": state.outer.state_dict()}, out)
    return out.getvalue()


def take_over(state: State, layout: Layout, data: bytes, digest: str) -> None:
    """Take over what `pack` made; E begins at 0. Raises `FormatError` or `DigestMismatch` for anything else, before anything is written."""
    try:
        found = torch.load(io.BytesIO(data), map_location=state.anchor[0].device, weights_only=True)
        anchor, outer, number = found["anchor"], found["outer"], int(found["round"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"what another rank sent is no state: {error}") from error
    if [tuple(tensor.shape) for tensor in anchor] != [tuple(tensor.shape) for tensor in state.anchor]:
        raise FormatError("what another rank sent is the state of other parameters")
    if layout.digest(anchor) != digest:
        raise DigestMismatch(f"another rank's anchor: expected digest {digest}, found {layout.digest(anchor)}")
    _write(state.anchor, anchor)
    for own in (state.feedback or []) + (state.age or []):
        own.zero_()
    state.outer.load_state_dict(outer)
    state.round = number
