"""What the end-to-end tests run inside clusters, as text: a job knows nothing of this folder."""

WHO = """
import json, os
from distributed import Client

def who(dask_worker):
    return dask_worker.name, [os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ.get("SLURMD_NODENAME") or os.uname().nodename, os.environ.get("OWN", "")]

if __name__ == "__main__":
    with Client() as client:
        client.wait_for_workers(int(os.environ.get("WANTED", "1")))
        found = dict(client.run(who).values())
        print(json.dumps({"workers": found, "address": client.scheduler.address}))
"""
"""Prints, as JSON, every worker's CUDA_VISIBLE_DEVICES and node."""

SLEEP = "import time, sys; print('here', flush=True); time.sleep(float(sys.argv[1]))"

SAVE = """
import signal, sys, time

def save(number, frame):
    print(signal.Signals(number).name, flush=True)
    time.sleep(float(sys.argv[1]))
    sys.exit("saved")

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # LSF sends it first
print("here", flush=True)
time.sleep(600)
"""
"""It takes some seconds to end after a SIGTERM, and is disturbed by a second one."""
