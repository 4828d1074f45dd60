"""PULSE inside loops and engines that people have. Each module imports its host; nothing here is imported by the rest of PULSE."""
