"""A stand-in for RMM, as far as dask-cuda and distributed call it: it says in the worker's log how it was set up."""


class mr:
    class PoolMemoryResource:
        pass

    @staticmethod
    def get_current_device_resource() -> object:
        return object()


def reinitialize(**options: object) -> None:
    print(f"fake rmm: managed_memory={options['managed_memory']}", flush=True)
