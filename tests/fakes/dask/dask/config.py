"""Part of the stub of dask: the functions of dask's configuration that a job calls."""

_values: dict[str, object] = {"distributed.nanny.preload": []}


def get(key: str, default: object = None) -> object:
    """Return the value of a key."""
    return _values.get(key, default)


def set(values: dict[str, object]) -> None:
    """Set values."""
    _values.update(values)
