"""What PULSE costs and gains, measured: sizes, speeds, and a longer real run."""
