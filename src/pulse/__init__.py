"""PULSE."""
