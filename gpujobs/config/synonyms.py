"""The words of other programs: batch schedulers, dask-jobqueue, dask-cuda, Coiled, SkyPilot.

The cluster classes translate some of them (see `gpujobs.deploy.vocabulary`); of the others, and in
files, they are hints. What a directive means is in the table of its batch scheduler.
"""

from __future__ import annotations

_ENV, _GPUS, _SETUP = "env", "gpus", "environment.setup"
_CPUS, _MEMORY, LINE = "cpus_per_job", "memory_per_job", "directives"
_NOTHING = "leave it out: a cluster of jobs has nothing like it"

WORDS: dict[str, str] = {
    # sbatch, and other batch schedulers
    **dict.fromkeys(("partition", "partitions", "queues"), "queue"),
    **dict.fromkeys(("time", "time_limit", "wall_time", "max_walltime", "runtime"), "walltime"),
    **dict.fromkeys(("wallclock", "wallclock_limit", "wall_clock", "h_rt"), "walltime"),
    **dict.fromkeys(("mem", "memory", "mem_per_node", "mem_per_cpu", "mem_per_gpu"), _MEMORY),
    **dict.fromkeys(("cpus", "cores", "ncores", "ncpus", "cpus_per_task", "job_cpu"), _CPUS),
    **dict.fromkeys(("ngpus", "gpu", "gres", "nodes", "ntasks", "num_gpus", "select"), _GPUS),
    **dict.fromkeys(("gpus_per_node", "ntasks_per_node", "processes"), "gpus_per_job"),
    **dict.fromkeys(("gpus_per_task", "worker_gpu", "worker_gpus"), "workers.gpus_per_worker"),
    **dict.fromkeys(("qos", "constraint", "nodelist", "exclude", "mail_type", "mail_user"), LINE),
    **dict.fromkeys(("licenses", "nice", "begin", "comment"), LINE),
    **dict.fromkeys(("job_extra", "job_extra_directives"), LINE),
    **dict.fromkeys(("command", "cmd", "script", "main", "wrap", "entrypoint"), "run"),
    **dict.fromkeys(("project", "bank", "charge_account"), "account"),
    **dict.fromkeys(("chdir", "cwd", "working_directory", "working_dir"), "workdir"),
    **dict.fromkeys(("environ", "envs", "variables", "environment_variables", "export"), _ENV),
    "dependency": "after",
    "job_name": "name",
    "job_mem": _MEMORY,
    # dask-jobqueue and dask-cuda
    **dict.fromkeys(("n_workers", "n_worker", "nworkers", "num_workers", "jobs"), _GPUS),
    **dict.fromkeys(("nthreads", "threads_per_worker", "worker_threads"), "workers.threads"),
    **dict.fromkeys(("memory_limit", "worker_memory", "memory_per_worker"), "workers.memory"),
    **dict.fromkeys(("worker_options", "worker_extra_args", "extra"), "workers.options"),
    **dict.fromkeys(("modules", "module", "job_script_prologue", "env_extra"), _SETUP),
    **dict.fromkeys(("nanny", "worker_command"), "workers.worker_class"),
    **dict.fromkeys(("wait_for_workers", "min_workers", "minimum"), "start_workers"),
    "rmm_allocator_external_lib_list": "workers.set_rmm_allocator_for_libs",
    **dict.fromkeys(("rmm_pool", "pool_size"), "workers.rmm_pool_size"),
    "log_spilling": "workers.cudf_spill_stats",
    "jit_unspill": "workers.enable_cudf_spill",
    "dashboard_address": "network.dashboard",
    "ip": "network.interface",
    # Coiled and SkyPilot
    **dict.fromkeys(("worker_gpu_type", "worker_vm_types", "accelerators"), "gpu_type"),
    "software": "environment",
    **dict.fromkeys(("conda", "conda_env", "venv", "host_setup_script"), _SETUP),
    **dict.fromkeys(("image", "image_id", "docker"), "environment.container"),
    **dict.fromkeys(("spot_policy", "use_spot", "max_restarts_on_errors"), "requeue"),
    **dict.fromkeys(("autostop", "idle_minutes_to_autostop"), "idle_timeout"),
    "num_nodes": _GPUS,
    "worker_cpu": _CPUS,
    "scheduler_cpu": "head.cpus",
    "scheduler_memory": "head.memory",
    "no_client_timeout": "client_timeout",
    # no key
    **dict.fromkeys(
        ("output", "error", "log_directory", "logs"), "`gpujobs logs` shows the logs of a cluster"
    ),
    **dict.fromkeys(
        ("cloud", "region", "zone", "spot", "disk_size", "file_mounts", "package_sync", "tags"),
        "leave it out: it is for machines of a cloud",
    ),
    **dict.fromkeys(
        ("header_skip", "job_directives_skip", "resource_spec", "request"),
        "`request` of the site file has the lines that request resources",
    ),
    "array": "leave it out: `gpus` and `gpus_per_job` give the number of jobs",
    "dashboard_link": "`cluster.dashboard_link` has it, as distributed.dashboard.link of dask says",
    "shebang": "`shell` of the site file is the first line of scripts",
    "use_stdin": "scripts are always passed on standard input",
    "shared_temp_directory": "use `directory` of the site file: it holds the certificates",
    "lsf_units": "use `request` of the site file, which contains the unit",
    "data": "use device_memory_limit and memory_limit: an object cannot be passed to a job",
    **dict.fromkeys(("services", "worker_services", "start"), _NOTHING),
    **dict.fromkeys(("scheduler_sync_interval", "worker_dashboard_address"), _NOTHING),
    "scheduler": "`site`: the site file names the batch scheduler",
    "scheduler_options": "`network` and `head` are about the dask scheduler",
}
"""Words of other programs: the keys of a profile that they mean, or, in a text, why none does."""

DETAILS = {
    _GPUS: "each GPU has one worker, or as `workers` says; GPUs of one job: `gpus_per_job`",
    _CPUS: "threads of a worker: `workers.threads`",
    _MEMORY: "memory of each worker: `workers.memory`",
    "workers.gpus_per_worker": "GPUs of one job: `gpus_per_job`",
}
"""What else the user of one of the words may have meant."""

INSIDE: dict[str, dict[str, str]] = {
    "Workers": {
        **dict.fromkeys(("cpus", "cores", "ncpus", "ncores"), "workers.threads"),
        "mem": "workers.memory",
        **dict.fromkeys(("n_workers", "nworkers", "number"), "workers.count"),
        **dict.fromkeys(("gpus", "gpu", "ngpus"), "workers.gpus_per_worker"),
    },
    "Site": {
        **dict.fromkeys(("qos", "constraint"), "directives"),
        **dict.fromkeys(("partition", "partitions", "queue"), "queues"),
        "modules": "setup",
        **dict.fromkeys(("walltime", "time"), "defaults.walltime"),
        **dict.fromkeys(("host", "hostname"), "hostnames"),
        "name": "the name of the file is the name of the site",
    },
    "Queue": {
        **dict.fromkeys(("qos", "constraint"), "directives"),
        **dict.fromkeys(("mem", "memory"), "memory_per_node"),
        **dict.fromkeys(("cpus", "cores", "ncpus"), "cpus_per_node"),
        **dict.fromkeys(("gpus", "gpu", "ngpus"), "gpus_per_node"),
        **dict.fromkeys(("time", "max_time", "time_limit"), "max_walltime"),
        **dict.fromkeys(("partition", "queue"), "name"),
        "node_count": "nodes",
    },
}
"""Words that mean something else in these sections, and the keys of site files."""
