"""The input files: site and profile in YAML, read with positions and validated."""
