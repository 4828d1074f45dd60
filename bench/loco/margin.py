"""What a method must show, written down before the first result of the comparison."""

from __future__ import annotations

MARGIN = 0.02
REASON = (
    "in a pilot with other seeds (100 to 103) dense DiLoCo went from 0.400 to 0.902 in 40 rounds, with a deviation over seeds of 0.002; "
    "seeds hardly matter, so that they cannot set the margin; 0.02 is 4 % of what DiLoCo learns, what it learns in the last three rounds"
)
