"""Spoils honest patches, payloads, manifests and indexes, and looks what comes of them.

python -m tests.fuzz.fuzz --seconds 600 [--seed N]      many cases; a failing one is written to a file, and ends it
python -m tests.fuzz.fuzz --seed N --case M             that case alone
"""

import argparse
import faulthandler
import json
import random
import sys
import time
from collections import Counter
from itertools import count, takewhile
from pathlib import Path

from pulse.codec import container
from tests.fuzz import mutations, oracle, samples

HANGS = 120  # seconds: the program then says where, and ends
WEIGHED = 16  # every so manyth case has its memory measured, which is slow


class Fuzzer:
    """Cases by number: the same seed and number make the same case."""

    def __init__(self, seed):
        self.seed = seed
        self.patches = samples.patches()
        self.payloads = samples.payloads()
        self.documents = samples.documents()

    def case(self, number):
        """(bytes, what looks at them, its arguments)."""
        rng = random.Random(f"{self.seed} {number}")
        if rng.random() < 0.1:
            data, read = rng.choice(self.documents)
            data = mutations.spoiled_document(rng, data, json.loads(data))
            return data, oracle.document_outcome, (data, read)
        pool, look = (self.payloads, oracle.payload_outcome) if rng.random() < 0.3 else (self.patches, oracle.patch_outcome)
        sample = mutations.spoiled(rng, rng.choice(pool), rng.choice(pool))
        return sample.blob, look, (sample,)

    def run(self, number):
        """The outcome of one case."""
        _, look, arguments = self.case(number)
        return oracle.memory_of(look, *arguments) if number % WEIGHED == 0 else look(*arguments)

    def run_all(self, numbers, folder):
        """How often each outcome came. A case that fails is written to `folder` and raised."""
        outcomes = Counter()
        for number in numbers:
            try:
                outcomes[self.run(number)] += 1
            except Exception as error:  # whatever it is, it is a failure
                kept = Path(folder) / f"fuzz-{self.seed}-{number}.bin"
                kept.write_bytes(self.case(number)[0])
                error.add_note(f"bytes in {kept}; again: python -m tests.fuzz.fuzz --seed {self.seed} --case {number}")
                raise
        return outcomes


def watched(seconds):
    """Numbers of cases until the time is up. A case that hangs ends the program, with a traceback."""
    started = time.monotonic()
    for number in takewhile(lambda _: time.monotonic() - started < seconds, count()):
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback_later(HANGS, exit=True)
        if number % 1000 == 0:
            print(f"case {number}", flush=True)
        yield number


def main():
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--case", type=int)
    parser.add_argument("--folder", default=".", help="where a failing case is written")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    fuzzer = Fuzzer(options.seed)
    if options.case is not None:
        print(fuzzer.run(options.case))
        return
    outcomes = fuzzer.run_all(watched(options.seconds), options.folder)
    cases = sum(outcomes.values())
    print(f"{cases} cases, {cases / options.seconds:.0f} per second, patch format {container.VERSION}")
    for outcome, times in outcomes.most_common():
        print(f"{times:9} {outcome}")


if __name__ == "__main__":
    sys.exit(main())
