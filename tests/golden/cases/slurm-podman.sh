#!/bin/bash
#SBATCH --job-name=svd-0000
#SBATCH --output=/home/ada/.gpujobs/%x/logs/slurm-%j.log
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gres=gpu:4
#SBATCH --mem=491520M

# --- this job ------------------------------------------------------------------------------------
export GPUJOBS_CLUSTER=$SLURM_JOB_NAME
export GPUJOBS_FOLDER=/home/ada/.gpujobs/$GPUJOBS_CLUSTER
export GPUJOBS_JOB=0
GPUJOBS_NODE=${SLURMD_NODENAME:-$HOSTNAME}
GPUJOBS_STARTED=$(date +%s)
export GPUJOBS_RUN=$GPUJOBS_STARTED-$GPUJOBS_NODE-$$   # the name of this start: the job may be requeued
{ cd "$GPUJOBS_FOLDER" && ls; } > /dev/null || { echo "gpujobs: $GPUJOBS_FOLDER is not there on $GPUJOBS_NODE" >&2; exit 78; }
exec >> "logs/job-$GPUJOBS_JOB.log" 2>&1 < /dev/null

gpujobs_event() {   # append an event of this job to its file: a word, and more of the line
    printf '\n{"event": "%s", "run": "%s", "node": "%s", "at": %(%s)T%s}\n' \
        "$1" "$GPUJOBS_RUN" "$GPUJOBS_NODE" -1 "${2-}" >> "$GPUJOBS_FOLDER/jobs/$GPUJOBS_JOB.jsonl"
}
gpujobs_quote() {   # print a text as JSON, clipped
    local text=${1:0:1000}
    text=${text//\\/\\\\} text=${text//\"/\\\"}
    printf '"%s"' "${text//[[:cntrl:]]/ }"
}
gpujobs_leave() {   # say that this job has left, however it ended
    local code=$? last ids=''
    [ "$BASHPID" = "$$" ] || return   # a signal came to the copy of bash that was to become a command
    builtin trap '' TERM INT HUP
    cd "$GPUJOBS_FOLDER" || return
    # A job that was asked to stop ends only itself, however it does that.
    if [ "$code" != 0 ] && [ "$code" != 143 ] && [ -z "${stopped-}" ] && [ ! -e ended ] &&
        ! grep -qsF "{\"event\": \"failed\", \"run\": \"$GPUJOBS_RUN\"" "jobs/$GPUJOBS_JOB.jsonl"; then
        [ "$code" -eq 137 ] || [ "$code" -eq 0 ] || last=$(gpujobs_last_error)
        gpujobs_fail "$GPUJOBS_CLUSTER-$GPUJOBS_JOB on $GPUJOBS_NODE could not start, or was killed (exit code $code)${last:+: $last}"
    fi
    gpujobs_event left ", \"code\": $code"
    # The head cannot cancel the waiting jobs from inside of its container.
    [ ! -e ended ] || ids=job-ids
    [ ! -s "$ids" ] || ! grep -qs "\"job\": $GPUJOBS_JOB," head-1/owner || xargs scancel --state=PENDING < "$ids"
}
gpujobs_last_error() {   # the last exception, or line with an error in it, of the log; else the last line
    tail -n 50 "logs/job-$GPUJOBS_JOB.log" | awk '/resource_tracker|warnings.warn| INFO /{next}
        /^(Traceback \(|  File ")/{inside=1; next} inside && /^[ ~^]/{next} /[[:alnum:]]/{last=$0}
        inside || tolower($0)~/error|cannot|no such|not found|denied/{bad=$0} {inside=0} END{print bad ? bad : last}' | cut -c 1-200
}
gpujobs_fail() {
    local reason
    reason=$(gpujobs_quote "$1")
    echo "gpujobs: $1"
    gpujobs_event failed ", \"reason\": $reason"
    # The first job that writes a reason ends the cluster.
    (set -C; printf '{"kind": "failed", "exit_code": 70, "reason": %s, "job": %d, "time": %d}\n' \
        "$reason" "$GPUJOBS_JOB" "$(date +%s)" > ended) 2> /dev/null
    [ ! -s job-ids ] || xargs scancel --state=PENDING < job-ids
}
# If a reply was lost, the jobs may have been submitted twice: only one job of each number does the work.
claim=jobs/$GPUJOBS_JOB.claim id="$SLURM_JOB_ID"
(set -C; echo "$id" > "$claim") 2> /dev/null || [ "$(cat "$claim")" = "$id" ] || {
    echo "gpujobs: $id is superfluous: job $GPUJOBS_JOB is $(cat "$claim")"; exit 0; }
gpujobs_event script ', "version": 1'
trap gpujobs_leave EXIT
trap 'exit 143' TERM INT HUP USR1 USR2
if [ -e ended ]; then echo "gpujobs: the cluster ended before this job started"; exit 0; fi

# --- environment ---------------------------------------------------------------------------------
[ -w "${TMPDIR:-/tmp}" ] || unset TMPDIR   # some batch schedulers pass on the login node's
cd /home/ada/svd || exit 77
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE   # of the node's Python
export PYTHONNOUSERSITE=1
export GREETING='it'"'"'s me'
export PYTHONUNBUFFERED=1

# --- container -----------------------------------------------------------------------------------
gpujobs_stop() {
    cd "$GPUJOBS_FOLDER" && gpujobs_fail "$GPUJOBS_CLUSTER-$GPUJOBS_JOB on $GPUJOBS_NODE: $1"
    exit 78
}
command -v podman > /dev/null ||
    gpujobs_stop "no command podman, which starts the container; is a module needed in setup?"
image=docker://docker.io/rapidsai/base:26.10
scratch="${TMPDIR:-/tmp}"
mkdir -p "$scratch"
export TMPDIR=$scratch
of_gpus=()
! grep -qs nvidia.com/gpu /etc/cdi/* /run/cdi/* ||
    of_gpus=(--device=nvidia.com/gpu=all)
of_image=("$image")
[ ! -d "$image" ] || of_image=(--read-only --read-only-tmpfs=false --rootfs "$image")
[ ! -d /dev/infiniband ] || of_image=(--device=/dev/infiniband --ulimit=memlock=-1 "${of_image[@]}")
# shellcheck disable=SC2016,SC2054 # names of variables, and commas, are for the program
container=(env --unset=LD_LIBRARY_PATH --unset=LD_PRELOAD podman --cgroup-manager=cgroupfs run \
        --rm --network=host --pid=host --log-driver=none --entrypoint= --env-host \
        --security-opt=label=disable --volume=/dev/shm:/dev/shm "${of_gpus[@]}" \
        --volume=/scratch:/scratch --volume="$PROJECT":/project \
        --volume=/home/ada/.gpujobs:/home/ada/.gpujobs --volume=/home/ada/svd:/home/ada/svd \
        --volume="$scratch":"$scratch" --workdir=/home/ada/svd --shm-size=1g --env=TMPDIR \
        --env=GREETING "${of_image[@]}")

# --- work ----------------------------------------------------------------------------------------
python=python3
stopped='' supervisor=''
# Torque may kill the supervisor before it can write why.
trap 'stopped=1; gpujobs_event signalled; kill -TERM "$supervisor" 2> /dev/null' TERM INT HUP USR1 USR2
"${container[@]}" \
    "$python" "$GPUJOBS_FOLDER/injob.pyz" supervise --started="$GPUJOBS_STARTED" \
    --gpus=4 --visible-devices=scheduler \
    --walltime=3600 --warning=60 \
    --start-timeout=300 --start-workers=1 \
    --batch-script="$$@$(readlink /proc/self/ns/pid)" --ask-outside \
    --schemes=tls \
    --scheduler "$python" "$GPUJOBS_FOLDER/injob.pyz" scheduler -- distributed.cli.dask_scheduler --port=0 \
        --dashboard-address=127.0.0.1:0 --scheduler-file="$GPUJOBS_FOLDER/scheduler.json" \
    --workers "$python" "$GPUJOBS_FOLDER/injob.pyz" workers --resources=GPU=1 \
        --local-directory="${TMPDIR:-/tmp}" -- dask_cuda.cli --nthreads=1 --memory-limit=120GiB \
        --dashboard-address=127.0.0.1:0 --death-timeout=300 --no-dashboard \
        --scheduler-file="$GPUJOBS_FOLDER/scheduler.json" \
    --run python svd.py --size 10000 &
supervisor=$!
[ -z "$stopped" ] || kill -TERM "$supervisor" 2> /dev/null   # the signal came before its pid was known

gpujobs_ask() {   # run commands of the batch scheduler for the supervisor, whose container has none of them
    local asked=$GPUJOBS_FOLDER/ask-$GPUJOBS_JOB
    while sleep 2; kill -0 "$supervisor" 2> /dev/null; do
        [ -e "$asked" ] || continue
        mv "$asked" "$asked.words"
        # shellcheck disable=SC2016 # for the inner shell
        xargs -0 sh -c '"$@" > "$0.out" 2> "$0.err"; echo $? > "$0.code"' "$asked" < "$asked.words"
    done
}
gpujobs_ask &
while kill -0 "$supervisor" 2> /dev/null; do wait "$supervisor"; done
wait "$supervisor"
code=$?
# bash loses the exit code of a process that dies while the signal interrupts `wait`, and says -1 or 127.
[ -z "$stopped" ] || case $code in -1 | 127) code=143 ;; esac
(exit "$code")
