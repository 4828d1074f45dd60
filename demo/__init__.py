"""The demo: RL steps of a real model reach inference workers as verified patches. Run it with ``python -m demo``."""
