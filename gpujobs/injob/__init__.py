"""The code that runs in jobs. Standard library and distributed only; Python 3.9 and newer.

The job's environment need not have gpujobs. So at submit this package is packed into one file,
`injob.pyz` in the cluster's folder, in which it is named `gpujobs_injob` (see `archive`). Its uses:

- ``python injob.pyz supervise …`` is the parent of all processes of a job: it decides which job is
  the head, starts the dask scheduler, the workers and the user's command, supervises them, and
  ends the cluster if one of them fails (`job`, `head`, `workers`);
- ``python injob.pyz node …``, started by ``N.ranks.sh``, supervises the workers of one node of an
  allocation of several nodes (`workers.Node`);
- ``python -m mpi4py injob.pyz rank …``, started by ``N.ranks.sh``, is one MPI rank of a script
  (`run_on: ranks`): it checks that MPI and its launcher match, takes its GPUs, and runs the script;
- ``python injob.pyz retire …`` moves the data of workers that must exit to other workers;
- ``python injob.pyz usage …`` samples how busy the GPUs of a job are (`gpus`);
- ``python injob.pyz launch`` runs in a container in place of the MPI launcher, which the batch
  script starts outside of it (`launcher`);
- ``python injob.pyz try-ucxx`` exits with 0 if ucxx works;
- ``--preload gpujobs_injob.preload``: a worker reports its GPU, the dask scheduler writes down
  which workers are registered. For that, dask's processes have the archive on their import path.

The protocol of the cluster's folder (every file is small, and written atomically)::

    head/          made by the job that starts first: mkdir succeeds once, on NFS too.
                   owner: which job that is; heartbeat: written again and again
    transport.json the protocol of dask's processes, and why it is not a better one
    scheduler.json dask's scheduler file
    workers.json   the registered workers, written by the dask scheduler (`registry.WorkerRegistry`)
    events.jsonl   workers that connected and disconnected, appended by the dask scheduler
    transfers.jsonl
                   samples of the bytes that each worker received, appended by the dask scheduler
    usage/         N-NODE.jsonl: samples of the GPUs of job N, appended by its sampler
    ended          made once, by the first process that ends the cluster: kind, exit_code, reason,
                   job, time (`folder.Ended`). Every process that finds it exits
    jobs/N.started job N has begun: node, started, pid, job_id; written by its supervisor
    jobs/N.json    how job N ended, written by its bash
    jobs/N.reason  why, as a sentence
    jobs/N.stopped job N got a signal of the batch scheduler; made by its bash
    jobs/N.claim   which job of the batch scheduler does the work of number N
    record.json    what `judge.pyz` needs to know of the cluster, written at each submission
    verdict.json   which jobs will not come, and why; written by `judge.pyz` or by `submit --wait`
    ask-N          a command of the batch scheduler that the batch script of job N runs, outside of
                   its container; ask-N.out, .err and .code are its result
    job-ids        the ids with which jobs that still wait are cancelled
    after          the cluster after whose end this one starts: cluster, folder, any_end
    over-N         attempt N has ended, and each of its jobs exits (see `attempts`)
    attempt        the number of the attempt that runs; attempt-N/ has the state of an earlier one
    leave-N        asks the workers of job N to exit
    jobs/N.node    the name of node N of an allocation; jobs/N.lost: why it is lost
    rank-error     the first error of an MPI rank: exit_code and reason
    script-ended   the script in all MPI ranks is over
    jobs/N.environment
                   of a job of several nodes before its setup; removed when N.ranks.sh is written
    jobs/N.ranks.sh
                   environment of its nodes and ranks; not every launcher passes it to other nodes
    jobs/N.launch-start, N.launch-stop, N.launch-exit
                   connect a container with the launcher outside: see `launcher`
    idle           written by the dask scheduler if the cluster must end because it had no work
    lease          touched by a client that owns the cluster; when it grows old, the head exits
"""
