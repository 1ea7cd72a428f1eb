#!/bin/bash
#PBS -N svd-0000
#PBS -j oe
#PBS -o /home/ada/.gpujobs/svd-0000/logs/pbs-^array_index^.log
#PBS -k oed
#PBS -m n
#PBS -r y
#PBS -S /bin/bash
#PBS -l walltime=06:00:00
#PBS -J 0-7
#PBS -q gpuvolta
#PBS -l ncpus=12
#PBS -l ngpus=1
#PBS -l mem=90GB
#PBS -P ab12
#PBS -l wd
#PBS -l storage=gdata/ab12+scratch/ab12

# PBS sets it to the job's CPUs, and every one of the job's workers would start as many threads.
unset OMP_NUM_THREADS

# --- this job ------------------------------------------------------------------------------------
export GPUJOBS_CLUSTER=svd-0000
export GPUJOBS_FOLDER=/home/ada/.gpujobs/$GPUJOBS_CLUSTER
export GPUJOBS_JOB=$((0 + PBS_ARRAY_INDEX))
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
    local code=$? last
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
}
# If a reply was lost, the jobs may have been submitted twice: only one job of each number does the work.
claim=jobs/$GPUJOBS_JOB.claim id="${PBS_JOBID/\[*\]/[]}[$PBS_ARRAY_INDEX]"
(set -C; echo "$id" > "$claim") 2> /dev/null || [ "$(cat "$claim")" = "$id" ] || {
    echo "gpujobs: $id is superfluous: job $GPUJOBS_JOB is $(cat "$claim")"; exit 0; }
gpujobs_event script ', "version": 1'
trap gpujobs_leave EXIT
trap 'exit 143' TERM INT HUP USR1 USR2
if [ -e ended ]; then echo "gpujobs: the cluster ended before this job started"; exit 0; fi

# --- environment ---------------------------------------------------------------------------------
[ -w "${TMPDIR:-/tmp}" ] || unset TMPDIR   # some batch schedulers pass on the login node's
cd /home/ada/svd || exit 77
export PATH=/opt/env/bin:$PATH
export PYTHONUNBUFFERED=1

# --- work ----------------------------------------------------------------------------------------
python=/opt/env/bin/python
stopped='' supervisor=''
# Torque may kill the supervisor before it can write why.
trap 'stopped=1; gpujobs_event signalled; kill -TERM "$supervisor" 2> /dev/null' TERM INT HUP USR1 USR2
"$python" "$GPUJOBS_FOLDER/injob.pyz" supervise --started="$GPUJOBS_STARTED" \
    --gpus=1 --visible-devices=scheduler \
    --walltime=21600 --warning=60 \
    --start-timeout=300 --start-workers=1 \
    --batch-script="$$@$(readlink /proc/self/ns/pid)" \
    --schemes=tls \
    --scheduler "$python" "$GPUJOBS_FOLDER/injob.pyz" scheduler -- distributed.cli.dask_scheduler --port=0 \
        --dashboard-address=127.0.0.1:0 --scheduler-file="$GPUJOBS_FOLDER/scheduler.json" \
    --workers "$python" "$GPUJOBS_FOLDER/injob.pyz" workers --resources=GPU=1 \
        --local-directory="${TMPDIR:-/tmp}" -- dask_cuda.cli --nthreads=1 --memory-limit=90GiB \
        --dashboard-address=127.0.0.1:0 --death-timeout=300 --no-dashboard \
        --scheduler-file="$GPUJOBS_FOLDER/scheduler.json" \
    --run python svd.py --size 10000 &
supervisor=$!
[ -z "$stopped" ] || kill -TERM "$supervisor" 2> /dev/null   # the signal came before its pid was known
while kill -0 "$supervisor" 2> /dev/null; do wait "$supervisor"; done
wait "$supervisor"
code=$?
# bash loses the exit code of a process that dies while the signal interrupts `wait`, and says -1 or 127.
[ -z "$stopped" ] || case $code in -1 | 127) code=143 ;; esac
(exit "$code")
