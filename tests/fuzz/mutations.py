"""What may happen to honest bytes: each takes a random generator, and nothing else is random."""

from copy import deepcopy
from dataclasses import replace

from tests.fuzz.containers import closed, loosely, opened, sealed
from tests.fuzz.samples import Sample

ODD = [0, 1, 2, 3, 7, 8, 20, 21, -1, 255, 256, 1 << 28, 1 << 31, 1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, 1 << 64, 0.5, 1e300]
ODD += [None, True, "", "a", "b", "new", "U8", "F4", "F64", "span", "box", "portable", "absolute", "contextual"]
ODD += [[], {}, [0, 1], [[0, 1]], [[], [256]], "\ud800"]


def spoiled_bytes(rng, data, most=4):
    """A few bytes replaced, removed, added, or one bit turned."""
    body = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(5):
            case 0:
                body[at : at + 1] = rng.randbytes(1)
            case 1:
                del body[at : at + rng.randint(1, 8)]
            case 2:
                body[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case _:
                body[at:] = rng.choice([b"", bytes(rng.randint(1, 9)), b"\xff" * 9, rng.randbytes(len(body) - at)])
    return bytes(body)


def spoiled_json(rng, value):
    """One to three places of a JSON object altered, in place."""
    for _ in range(rng.randint(1, 3)):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], (list, dict)) and place[key] and rng.random() < 0.8:
                place = place[key]
                continue
            match rng.randrange(4):
                case 0 if isinstance(place[key], int):
                    place[key] += rng.choice([-1, 1])
                case 1 if isinstance(place, list):
                    place.insert(key, deepcopy(place[key]))
                case 2:
                    del place[key]
                case _:
                    place[key] = deepcopy(rng.choice(ODD))
            break
    return value


def body(rng, sample, _):
    """Bytes of the container, under an honest trailer."""
    return replace(sample, blob=sealed(spoiled_bytes(rng, sample.blob[:-32])))


def trailer_too(rng, sample, _):
    """Bytes of the container, the trailer as it was."""
    return replace(sample, blob=spoiled_bytes(rng, sample.blob))


def header(rng, sample, _):
    """Places in the header."""
    found, pieces = opened(sample.blob)
    return replace(sample, blob=closed(spoiled_json(rng, found), pieces))


def section(rng, sample, _):
    """One section, its size told honestly."""
    found, pieces = opened(sample.blob)
    if pieces:
        at = rng.randrange(len(pieces))
        pieces[at] = spoiled_bytes(rng, pieces[at], most=2)
    return replace(sample, blob=closed(found, pieces))


def exchanged(rng, sample, other):
    """Sections that come from elsewhere."""
    (found, pieces), (_, foreign) = opened(sample.blob), opened(other.blob)
    for _ in range(rng.randint(1, 3)):
        if pieces and (foreign or len(pieces) > 1):
            pieces[rng.randrange(len(pieces))] = rng.choice(foreign or pieces)
    return replace(sample, blob=closed(found, pieces))


def counted(rng, sample, _):
    """A block's count, and in a patch its part's, which agree and lie."""
    found, pieces = opened(sample.blob)
    if found["blocks"]:
        by = rng.choice([-1, 1, 5])
        rng.choice(found["blocks"])[0] += by
        if found.get("parts"):
            rng.choice(found["parts"])[4] += by
    return replace(sample, blob=closed(found, pieces))


def foreign_header(_, sample, other):
    """The header of one, the sections of another."""
    return replace(sample, blob=closed(opened(sample.blob)[0], opened(other.blob)[1]))


def base(rng, sample, other):
    """Weights that rotted, or other ones."""
    if rng.random() < 0.1:
        return replace(sample, base=other.base)
    name = rng.choice(sorted(sample.base))
    rotten = sample.base[name].copy()
    for _ in range(rng.choice([1, 1, 5])):
        rotten.flat[rng.randrange(rotten.flat.size)] ^= rotten.flat.dtype.type(1 << rng.randrange(8 * rotten.flat.itemsize))
    return replace(sample, base={**sample.base, name: rotten})


KINDS = [body, trailer_too, header, header, section, section, section, exchanged, counted, foreign_header, base]


def spoiled(rng, sample, other) -> Sample:
    """A sample to which something happened, perhaps twice; `other` lends its parts."""
    sample = rng.choice(KINDS)(rng, sample, other)
    return base(rng, sample, other) if rng.random() < 0.1 else sample


def spoiled_document(rng, data, value):
    """A manifest's bytes, or the JSON in them, spoiled."""
    return spoiled_bytes(rng, data) if rng.random() < 0.3 else loosely(spoiled_json(rng, value))
