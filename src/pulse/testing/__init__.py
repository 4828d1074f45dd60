"""For those who test what they build on PULSE: a contract suite for object stores, and stores that fail on purpose. Needs pytest."""

import pytest

pytest.register_assert_rewrite("pulse.testing.store")
