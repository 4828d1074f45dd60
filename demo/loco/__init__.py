"""The whole picture: several trainers train one model, and workers follow what they agree on. Run it with ``python -m demo.loco``."""
