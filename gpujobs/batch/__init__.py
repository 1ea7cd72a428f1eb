"""Runs the commands of batch schedulers: the only processes on this side of a job."""
