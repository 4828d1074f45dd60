"""`pulse diff`, `pulse apply`, `pulse inspect`: patches between checkpoints, without a store."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pulse.cli.console import Json, about, emit, factor, percent, progress, reported, size, table
from pulse.errors import FileError, FormatError

_WEIGHTS = "A .safetensors file, a Hugging Face directory, or STORE@VERSION."
Old = Annotated[str, typer.Argument(metavar="OLD", help=_WEIGHTS, show_default=False)]
New = Annotated[str, typer.Argument(metavar="NEW", help=_WEIGHTS, show_default=False)]
PatchFile = Annotated[Path, typer.Argument(metavar="PATCH", help="A patch that pulse diff wrote.", show_default=False)]


class EncodingName(StrEnum):
    """The encodings a user may ask for."""

    contextual = "contextual"
    portable = "portable"
    absolute = "absolute"


@reported
def diff(
    old: Old,
    new: New,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the patch here; without it, only say what differs.")] = None,
    encoding: Annotated[
        EncodingName,
        typer.Option(help="contextual: smallest, read beside all of OLD. portable: needs OLD only where it writes. absolute: not at all."),
    ] = EncodingName.contextual,
    as_json: Json = False,
) -> None:
    """The difference between two checkpoints as a small exact patch. Exits 0 also when they differ."""
    from pulse import codec, files
    from pulse import patch as patches
    from pulse.cli.sources import read_weights

    if output is not None and output.exists() and not _is_patch(output):
        raise FileError(f"{output} exists and is not a patch; it is not overwritten")
    with progress("comparing", as_json=as_json) as report:
        before, after = read_weights(old, report), read_weights(new, report)
        patch = patches.diff(before, after)
        blob = codec.encode(patch, before, encoding=encoding.value)
    if output is not None:
        files.write_file(output, blob)
    units = sum(bits.flat.size for bits in after.values())
    full = sum(bits.spec.nbytes for bits in after.values())
    touched = len(patch.names & set(after))
    result = {
        "output": None if output is None else str(output),
        "encoding": encoding.value,
        "bytes": len(blob),
        "full_bytes": full,
        "ratio": full / len(blob),
        "changed": patch.changed,
        "weights": units,
        "tensors": len(after),
        "tensors_touched": touched,
        "whole": sorted(patch.whole),
        "added": sorted(set(after) - set(before)),
        "removed": list(patch.removed),
        "base": patch.base,
        "result": patch.result,
    }
    each = f", {len(blob) / patch.changed:.3g} B per change" if patch.changed else ""
    lines = [
        f"{output or 'not written (-o)'}: {size(len(blob))}, {encoding.value}, {factor(full, len(blob))} smaller than NEW{each}",
        f"  {patch.changed:,} of {units:,} weights changed ({percent(patch.changed, units)}) in {touched} of {len(after)} tensors"
        + _extras(result),
        f"  base   {patch.base}   (state digest of OLD)",
        f"  result {patch.result}   (state digest of NEW)",
    ]
    emit(result, lines, as_json=as_json)


def _is_patch(path: Path) -> bool:
    """Whether a file starts as patches do."""
    from pulse.codec.container import MAGIC

    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _extras(result: dict[str, Any]) -> str:
    parts = [f"{len(result[key])} {key}" for key in ("whole", "added", "removed") if result[key]]
    return f"; {', '.join(parts)}" if parts else ""


@reported
def apply(
    patch: PatchFile,
    old: Old,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the result: NAME.safetensors, or a new directory.")],
    as_json: Json = False,
) -> None:
    """Apply a patch to the checkpoint it was made for, and prove the result."""
    from pulse import checkpoint, codec, files, follow
    from pulse import patch as patches
    from pulse.cli.sources import read_weights

    if output.is_file() and patch.is_file() and output.samefile(patch):
        raise FileError(f"{output} is the patch that is read here; write the result elsewhere")
    if not _is_patch(patch) and Path(old).is_file() and _is_patch(Path(old)):
        raise FormatError(f"{patch} is not a patch, but {old} is: pulse apply PATCH OLD -o NEW")
    blob = files.read_file(patch)
    with progress("applying", as_json=as_json) as report:
        before = read_weights(old, report)
        with about(patch):
            decoded = codec.decode(blob, before, max_bytes=64 * sum(bits.spec.nbytes for bits in before.values()) + (1 << 30))
        after = patches.apply(decoded, before)
        if output.suffix == ".safetensors":
            checkpoint.write(output, after)
        else:
            beside = checkpoint.companions(old) if Path(old).is_dir() else []
            follow.write_directory(output, after, [(name, files.read_file(path)) for name, path in beside])
    result = {"output": str(output), "changed": decoded.changed, "base": decoded.base, "result": decoded.result}
    lines = [f"{output}: {decoded.changed:,} weights changed", f"  state digest {decoded.result} as the patch says"]
    emit(result, lines, as_json=as_json)


@reported
def inspect(
    patch: PatchFile,
    every: Annotated[bool, typer.Option("--all", help="List every tensor, not only the 15 with the most changes.")] = False,
    as_json: Json = False,
) -> None:
    """What a patch holds, read from its header; its trailer digest is checked."""
    from pulse import codec, files

    blob = files.read_file(patch)
    with about(patch):
        header = codec.inspect(blob)
    rows = [(part.name, str(part.spec), count, part.units) for part, count in header.parts]
    rows += [(name, str(spec), spec.units, spec.units) for name, spec in header.whole]
    rows.sort(key=lambda row: (-row[2], row[0]))
    result = {
        "bytes": len(blob),
        "encoding": header.encoding,
        "block": header.block,
        "base": header.base,
        "result": header.result,
        "changed": header.changed,
        "tensors": [{"name": name, "spec": spec, "changed": count, "weights": units} for name, spec, count, units in rows],
        "whole": [name for name, _ in header.whole],
        "removed": list(header.removed),
    }
    shown = rows if every else rows[:15]
    whole = {name for name, _ in header.whole}
    each = f", {len(blob) / header.changed:.3g} B per change" if header.changed else ""
    lines = [
        f"{patch}: patch format 0, {header.encoding}, {size(len(blob))}, {header.changed:,} changes in {len(rows)} tensors{each}",
        f"  base   {header.base}",
        f"  result {header.result}",
        *[f"  {line}" for line in table(("tensor", "type", "changed", "share"), [
            (name, spec, f"{count:,}", "whole" if name in whole else percent(count, units)) for name, spec, count, units in shown
        ])],
        *([f"  … {len(rows) - len(shown)} more (--all)"] if len(shown) < len(rows) else []),
        *[f"  removed: {name}" for name in header.removed],
    ]  # fmt: skip
    emit(result, lines, as_json=as_json)
