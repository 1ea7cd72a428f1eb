"""The code that runs in jobs. Standard library and distributed only; Python 3.9 and newer.

The job's environment need not have gpujobs. So at submit this package is packed into one file,
`injob.pyz` in the cluster's folder, in which it is named `gpujobs_injob` (see `archive`).
docs/in-a-job.md lists its sub-commands, and the files of the cluster's folder: every file is small,
and written atomically.
"""
