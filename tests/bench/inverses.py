"""Readers of the layouts in `bench.rivals`: bytes and the old bits in, the new bits out. They prove that nothing is missing."""

import json
import struct
from itertools import accumulate

import numpy as np
import zstandard

from bench import rivals
from bench.steps import Change
from pulse.codec.sections import unzigzag


def unzstd(blob):
    return zstandard.ZstdDecompressor().decompress(blob)


def header_of(data):
    (size,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + size])["tensors"], data[4 + size :]


class Cursor:
    """Reads arrays from bytes, one after the other."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count, dtype):
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at += found.nbytes
        return found


def written(old, positions, values):
    new = old.copy()
    new[positions] = values
    return new


def paper(blob, old):
    entries, body = header_of(unzstd(blob))
    new = dict(old)
    for entry in entries:
        cursor = Cursor(body[entry["offset"] :])
        dtypes = entry["row_dtype"], entry["col_dtype"], "<u2"
        row_steps, column_steps, values = (cursor.take(entry["num_nonzero"], dtype) for dtype in dtypes)
        row = column = 0
        positions = []
        for row_step, column_step in zip(row_steps.tolist(), column_steps.tolist(), strict=True):
            row, column = (row + row_step, column_step) if row_step else (row, column + column_step)
            positions.append(row * int(np.prod(entry["shape"][1:])) + column)
        new[entry["name"]] = written(old[entry["name"]], positions, values)
    return new


def kindest(blob, old):
    sizes = struct.unpack_from("<4I", blob)
    ends = list(accumulate(sizes, initial=16))
    header, low, escapes, values = (unzstd(blob[lo : lo + size]) for lo, size in zip(ends, sizes, strict=False))
    entries, _ = header_of(header)
    gaps = np.frombuffer(low, "u1").astype(np.int64)
    gaps[gaps == rivals.ESCAPE] = np.frombuffer(escapes, "u1").reshape(4, -1).T.copy().view("<u4")[:, 0]
    new, at = dict(old), 0
    for entry in entries:
        span = slice(at, at + entry["changed"])
        new[entry["name"]] = written(old[entry["name"]], np.cumsum(gaps[span]), np.frombuffer(values, "<u2")[span])
        at = span.stop
    return new


def nemo(blob, old):
    entries, body = header_of(unzstd(blob))
    cursor, new = Cursor(body), dict(old)
    for entry in entries:
        before = old[entry["name"]]
        positions = np.cumsum(cursor.take(entry["changed"], entry["gaps"]).astype(np.int64))
        new[entry["name"]] = written(before, positions, before[positions] ^ cursor.take(entry["changed"], "<u2"))
    return new


def frames(blob):
    entries, body = header_of(blob)
    ends = accumulate((entry["size"] for entry in entries), initial=0)
    return [(entry["name"], body[start : start + entry["size"]]) for entry, start in zip(entries, ends, strict=False)]


def xor(blob, old):
    return old | {name: old[name] ^ np.frombuffer(unzstd(frame), "<u2") for name, frame in frames(blob)}


def raw(blob, old):
    entries, body = header_of(blob)
    cursor, new = Cursor(body), dict(old)
    for entry in entries:
        positions = cursor.take(entry["changed"], "<i4")
        new[entry["name"]] = written(old[entry["name"]], positions, cursor.take(entry["changed"], "<u2"))
    return new


def patch_from(blob, old):
    return old | {name: np.concatenate(list(_patched(frame, old[name]))) for name, frame in frames(blob)}


def _patched(frame, before):
    at = 0
    for (piece,) in rivals.pieces(before):
        (size,) = struct.unpack_from("<I", frame, at)
        prefix = zstandard.ZstdCompressionDict(piece.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        decompressor = zstandard.ZstdDecompressor(dict_data=prefix, max_window_size=1 << zstandard.WINDOWLOG_MAX)
        yield np.frombuffer(decompressor.decompress(frame[at + 4 : at + 4 + size]), "<u2")
        at += 4 + size


def class_rice(blob, old):
    entries, body = header_of(unzstd(blob))
    cursor, new = Cursor(body), dict(old)
    total = sum(entry["classes"] for entry in entries)
    table = Cursor(cursor.take(2 * total, "u1").tobytes())
    counts = Cursor(cursor.take(4 * total, "u1").reshape(4, -1).T.copy().view("<u4").tobytes())
    index = Cursor(cursor.take(sum(entry["index"] for entry in entries), "u1").tobytes())
    tables = [(table.take(2 * n, "u1").reshape(-1, 2), counts.take(n, "<u4")) for n in (entry["classes"] for entry in entries)]
    changed = [int(found.sum()) for _, found in tables]
    low = Cursor(cursor.take(sum(changed), "u1").tobytes())
    for entry, (classes, found) in zip(entries, tables, strict=True):
        before = old[entry["name"]]
        bits = iter(np.unpackbits(index.take(entry["index"], "u1")).tolist())
        positions = []
        for (kind, parameter), count in zip(classes.tolist(), found.tolist(), strict=True):
            members = np.flatnonzero(((before >> 7) & 0xFF) == kind)
            ranks = np.cumsum([_rice(bits, parameter) + 1 for _ in range(count)]) - 1
            positions.append(members[ranks])
        steps = low.take(sum(map(len, positions)), "u1").astype("<u2")
        escaped = steps == rivals.ESCAPE
        steps[escaped] = cursor.take(int(escaped.sum()), "<u2")
        where = np.concatenate(positions)
        new[entry["name"]] = written(before, where, before[where] + unzigzag(steps))
    return new


def _rice(bits, parameter):
    quotient = 0
    while not next(bits):
        quotient += 1
    for _ in range(parameter):
        quotient = quotient << 1 | next(bits)
    return quotient


INVERSES = {
    rivals.paper: paper,
    rivals.flat: kindest,
    rivals.nemo: nemo,
    rivals.xor: xor,
    rivals.raw: raw,
    rivals.patch_from: patch_from,
    rivals.class_rice: class_rice,
}


def changes_between(old, new, shapes):
    found = []
    for name in sorted(old):
        positions = np.flatnonzero(old[name] != new[name])
        if positions.size:
            found.append(Change(name, shapes[name], positions, old[name], new[name]))
    return found
