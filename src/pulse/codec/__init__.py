"""Patches as bytes: `encode`, `decode`, and the header alone. The layout is specified in docs/format.md."""

from pulse.codec.header import ENCODINGS, Encoding, Header, check_specs, inspect, read_header
from pulse.codec.patches import decode, encode

__all__ = ["ENCODINGS", "Encoding", "Header", "check_specs", "decode", "encode", "inspect", "read_header"]
