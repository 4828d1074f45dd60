"""PULSELoCo beside its rivals: four trainers of one small model, over the same tokens, by every method that the library has.

``python -m bench.loco`` makes the model, plays every cell (a method and a seed), and writes a page. What a method must show is written down
in margin.py, from before the first result.
"""
