"""What people write: the two YAML files, read with positions and checked."""
