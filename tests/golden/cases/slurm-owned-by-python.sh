#!/bin/bash -l
#SBATCH --job-name=svd-0000
#SBATCH --output=/home/ada/.gpujobs/%x/logs/slurm-%A_%a.log
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --array=0-3
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:a100:2
#SBATCH --mem=245760M
#SBATCH --account=p12345
#SBATCH --constraint=nvme

# --- this job ------------------------------------------------------------------------------------
export GPUJOBS_CLUSTER=$SLURM_JOB_NAME
export GPUJOBS_FOLDER=/home/ada/.gpujobs/$GPUJOBS_CLUSTER
export GPUJOBS_JOB=$((0 + SLURM_ARRAY_TASK_ID))
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
    set +eu
    builtin trap - ERR DEBUG
    local here=$PWD why=''
    [ "$code" = 143 ] || [ -z "$gpujobs_in_setup" ] || why="setup ended the job: ${gpujobs_line:0:100}"
    cd "$GPUJOBS_FOLDER" || return
    # A job that was asked to stop ends only itself, however it does that.
    if [ "$code$why" != 0 ] && [ "$code" != 143 ] && [ -z "${stopped-}" ] && [ ! -e ended ] &&
        ! grep -qsF "{\"event\": \"failed\", \"run\": \"$GPUJOBS_RUN\"" "jobs/$GPUJOBS_JOB.jsonl"; then
        [ "$code" -eq 137 ] || [ "$code" -eq 0 ] || last=$(gpujobs_last_error)
        [ -z "$why" ] || last="${last:+$last; }$why"
        [ -z "$gpujobs_failed" ] || last="${last:+$last; }setup: $gpujobs_failed"
        gpujobs_fail "$GPUJOBS_CLUSTER-$GPUJOBS_JOB on $GPUJOBS_NODE could not start, or was killed (exit code $code)${last:+: $last}"
        [ "$code" -ne 0 ] || code=70   # no worker has started
    fi
    gpujobs_event left ", \"code\": $code"
    [ -n "$gpujobs_exit_trap" ] || return
    cd "$here" || return
    (exit "$code")
    eval "$gpujobs_exit_trap"
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
}
# If a reply was lost, the jobs may have been submitted twice: only one job of each number does the work.
claim=jobs/$GPUJOBS_JOB.claim id="${SLURM_ARRAY_JOB_ID}[$SLURM_ARRAY_TASK_ID]"
(set -C; echo "$id" > "$claim") 2> /dev/null || [ "$(cat "$claim")" = "$id" ] || {
    echo "gpujobs: $id is superfluous: job $GPUJOBS_JOB is $(cat "$claim")"; exit 0; }
gpujobs_event script ', "version": 1'
gpujobs_in_setup='' gpujobs_exit_trap='' gpujobs_failed=''
trap gpujobs_leave EXIT
trap 'exit 143' TERM INT HUP USR1 USR2
if [ -e ended ]; then echo "gpujobs: the cluster ended before this job started"; exit 0; fi

gpujobs_reach() {   # succeeds if a process listens at the dask scheduler's address
    address=$(sed -n 's/.*"address": *"[a-z]*:\/\/\([^"]*\)".*/\1/p' scheduler.json 2> /dev/null | tr -d '[]')
    # shellcheck disable=SC2016 # $0 is the inner bash's
    [ -z "$address" ] || timeout 3 bash -c ': < "/dev/tcp/${0%:*}/${0##*:}"' "$address" 2> /dev/null
}
gpujobs_reach || { sleep 1; gpujobs_reach; } || { sleep 1; gpujobs_reach; } || {
    why="compute node $GPUJOBS_NODE cannot reach the dask scheduler at ${address:-no address}"
    gpujobs_fail "$why: it is gone, or set interface or scheduler='job'"
    exit 0; }

# --- environment ---------------------------------------------------------------------------------
[ -w "${TMPDIR:-/tmp}" ] || unset TMPDIR   # some batch schedulers pass on the login node's
cd /home/ada || exit 77
gpujobs_line='' gpujobs_at=0 gpujobs_before='' gpujobs_before_at=0
gpujobs_setup_failed() {   # note the first lines that fail, but not in sourced files; setup continues
    local line=$2
    [ -z "$4" ] || return 0
    # Bash names the last command inside of a function that failed: the one before, of the same line, has called it.
    [ "$3" != "$gpujobs_before_at" ] || [[ $line == "("* ]] || line=$gpujobs_before
    gpujobs_line=$line
    line="${line:0:100} failed (exit code $1)"
    [ -z "${gpujobs_failed:300}" ] && [[ $gpujobs_failed != *"$line" ]] || return 0
    gpujobs_failed+="${gpujobs_failed:+; }$line"
    gpujobs_event "setup failed" ", \"text\": $(gpujobs_quote "$gpujobs_failed")"
}
gpujobs_keep_exit_trap() {   # gpujobs_leave runs the trap of setup, which must not replace it
    local own words
    own=$(builtin trap -p EXIT)
    [ "$BASHPID" = "$$" ] && [[ $own != *gpujobs_leave* ]] || return 0
    eval "words=($own)"
    gpujobs_exit_trap=${words[2]-}
    builtin trap gpujobs_leave EXIT
}
gpujobs_note() { gpujobs_before=$gpujobs_line gpujobs_before_at=$gpujobs_at gpujobs_line=$1 gpujobs_at=$2; }
# shellcheck disable=SC2064 # the words are those of setup
trap() { builtin trap "$@" && gpujobs_keep_exit_trap; }
gpujobs_in_setup=1
trap 'gpujobs_note "$BASH_COMMAND" "$LINENO" "$_"' DEBUG   # and $_ stays what it is
trap 'gpujobs_setup_failed "$?" "$BASH_COMMAND" "$LINENO" "${BASH_SOURCE[1]-}"' ERR
# of the site
module load cuda/12.6
set +eu
[[ $(builtin trap -p ERR) != *gpujobs_setup_failed* ]] || builtin trap - ERR
[[ $(builtin trap -p DEBUG) != *gpujobs_note* ]] || builtin trap - DEBUG
gpujobs_keep_exit_trap
unset -f trap
unset gpujobs_line gpujobs_at gpujobs_before gpujobs_before_at   # set -a may have exported them
export -n gpujobs_failed   # which gpujobs_leave needs
gpujobs_in_setup=''
export PATH=/opt/env/bin:$PATH
export PYTHONUNBUFFERED=1

# --- work ----------------------------------------------------------------------------------------
python=/opt/env/bin/python
stopped='' supervisor=''
# Torque may kill the supervisor before it can write why.
trap 'stopped=1; gpujobs_event signalled; kill -TERM "$supervisor" 2> /dev/null' TERM INT HUP USR1 USR2
"$python" "$GPUJOBS_FOLDER/injob.pyz" supervise --started="$GPUJOBS_STARTED" \
    --gpus=2 --visible-devices=scheduler \
    --walltime=3600 --warning=60 \
    --start-timeout=300 \
    --batch-script="$$@$(readlink /proc/self/ns/pid)" \
    --client-owns \
    --workers "$python" "$GPUJOBS_FOLDER/injob.pyz" workers --resources=GPU=1 \
        --local-directory="${TMPDIR:-/tmp}" -- dask_cuda.cli --nthreads=1 --memory-limit=120GiB \
        --dashboard-address=127.0.0.1:0 --death-timeout=300 --no-dashboard --interface=ib0 \
        --scheduler-file="$GPUJOBS_FOLDER/scheduler.json" &
supervisor=$!
[ -z "$stopped" ] || kill -TERM "$supervisor" 2> /dev/null   # the signal came before its pid was known
while kill -0 "$supervisor" 2> /dev/null; do wait "$supervisor"; done
wait "$supervisor"
code=$?
# bash loses the exit code of a process that dies while the signal interrupts `wait`, and says -1 or 127.
[ -z "$stopped" ] || case $code in -1 | 127) code=143 ;; esac
(exit "$code")
