"""Part of the stub of dask."""


def __getattr__(name: str) -> object:
    if name != "Client":
        raise AttributeError(name)
    import stub

    return stub.Client
