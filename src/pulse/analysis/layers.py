"""Which kind of layer a tensor belongs to, by the names that Hugging Face models use."""

from __future__ import annotations

import re

_PATTERNS = {
    "norm": r"norm|(^|\.)ln_\w+(\.|$)",
    "head": r"(^|\.)(lm_head|score|embed_out)(\.|$)|^output\.",
    "embedding": r"embed|(^|\.)(wte|wpe)(\.|$)",
    "attention qkv": r"qkv|(^|\.)(c_attn|query_key_value|Wqkv)(\.|$)",
    "attention q": r"(^|\.)(q_proj|q_[ab]_proj|query|wq)(\.|$)",
    "attention k": r"(^|\.)(k_proj|key|wk)(\.|$)",
    "attention v": r"(^|\.)(v_proj|value|wv)(\.|$)",
    "attention o": r"(^|\.)(o_proj|out_proj|wo)(\.|$)|attn\.c_proj|attention\.dense",
    "mlp gate": r"(^|\.)(gate_proj|gate_up_proj|w1)(\.|$)",
    "mlp up": r"(^|\.)(up_proj|w3|c_fc|fc1|dense_h_to_4h)(\.|$)",
    "mlp down": r"(^|\.)(down_proj|w2|fc2|dense_4h_to_h)(\.|$)|mlp\.c_proj",
}
_NORM, _HEAD, *_INNER = _PATTERNS
KINDS = (*_INNER, _NORM, _HEAD, "other")  # in about the order of a forward pass
_COMPILED = {kind: re.compile(pattern) for kind, pattern in _PATTERNS.items()}


def kind_of(name: str) -> str:
    """The kind of layer that a tensor of that name is, `other` where the name says nothing.

    >>> kind_of("model.layers.20.self_attn.q_proj.weight"), kind_of("model.layers.20.self_attn.q_norm.weight")
    ('attention q', 'norm')
    """
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(name)), "other")
