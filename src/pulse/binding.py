"""Which published tensor goes into which tensor of a receiver, ties included: a pure decision, taken before anything is written."""

from __future__ import annotations

from collections.abc import Mapping

from pulse.bits import Spec
from pulse.errors import WeightsMismatch
from pulse.manifest import TensorIndex

Binding = Mapping[str, tuple[str, ...]]  # published canonical name -> the receiver's canonical names that hold it


def bind(index: TensorIndex, specs: Mapping[str, Spec], aliases: Mapping[str, str]) -> Binding:
    """Bind what is published to a receiver with these tensors and ties.

    A tensor that the publisher stores once under several names is written to each of them that the receiver keeps apart. Raises
    `WeightsMismatch`, naming the tensors, when a published one has no place, a local one no source, two published ones one place, or
    when dtypes or shapes differ: nothing is ever cast, reinterpreted or skipped.
    """
    names_of = {name: [name] for name in index.specs}
    for alias, canonical in index.aliases.items():
        names_of[canonical].append(alias)
    binding: dict[str, tuple[str, ...]] = {}
    source: dict[str, str] = {}
    homeless = []
    for name, names in names_of.items():
        local = list(dict.fromkeys(aliases.get(other, other) for other in names if aliases.get(other, other) in specs))
        for place in local:
            if place in source:
                raise WeightsMismatch(
                    f"{source[place]} and {name} are published apart, but tied to {place} here: untie them, or tie them there"
                )
            source[place] = name
            if specs[place] != index.specs[name]:
                raise WeightsMismatch(
                    f"{place}: published as {index.specs[name]}, here it is {specs[place]}; {_advice(index.specs[name], specs[place])}"
                )
        homeless += [] if local else [name]
        binding[name] = tuple(local)
    if homeless:
        raise WeightsMismatch(f"published, but missing here: {_few(homeless)}")
    if sourceless := sorted(set(specs) - set(source)):
        raise WeightsMismatch(f"here, but not published: {_few(sourceless)}")
    return binding


def _advice(published: Spec, here: Spec) -> str:
    if published.shape != here.shape:
        return "the two sides have different models"
    return "publish with a view (view=) of the receiver's dtype, or load the receiver in the published one"


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
