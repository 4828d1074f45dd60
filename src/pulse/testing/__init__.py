"""For those who test what they build on PULSE: a contract suite for object stores (needs pytest), and stores that fail on purpose."""
