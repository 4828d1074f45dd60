"""Patches as bytes: `encode`, `decode`, and the header alone. The layout is specified in docs/format.md."""

from pulse.codec.patches import ENCODINGS, Encoding, Header, check_specs, decode, encode, inspect, read_header

__all__ = ["ENCODINGS", "Encoding", "Header", "check_specs", "decode", "encode", "inspect", "read_header"]
