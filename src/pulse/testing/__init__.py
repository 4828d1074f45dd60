"""For tests: ours, and those of whoever implements one of the seams."""
