"""A stand-in for RMM, as far as dask-cuda and distributed call it: it says in the worker's log how it was set up."""


class mr:
    class PoolMemoryResource:
        pass

    @staticmethod
    def get_current_device_resource() -> object:
        return object()


def reinitialize(**options: object) -> None:
    print(f"fake rmm: managed_memory={options['managed_memory']}", flush=True)


class DeviceBuffer:
    """GPU memory, as far as it is allocated and sent."""

    def __init__(self, size: int, data: bytes = b"") -> None:
        self.data = data or bytes(size)

    def __reduce__(self) -> tuple:
        return DeviceBuffer, (len(self.data), self.data)


DeviceBuffer.__module__ = "stand_in"  # distributed would serialize a class of rmm with numba
