#!/usr/bin/env bash
# Trains on a cluster with Slurm. From the project's folder, which all nodes have to share:
#
#   sbatch launch/slurm.sh --run-name a --steps 10000
#   sbatch --array=0-4 launch/slurm.sh --run-name a     # five runs with seeds of their own, a-0 to a-4
#
# What follows the file are settings, as for train.sh. The processes print to runs/NAME/slurm.log; what
# this script says is in slurm-<job>.out. Before the time limit, and where another job takes the nodes,
# the run is saved, goes back into the queue, and goes on from there; after a crash or the loss of a
# node, from its last checkpoint. A hook or setting that fails ends the job.
#
# Trusted networks only: the port of each process has no password and no encryption, and whoever reaches it can
# read and write files and run programs as you. Let only the cluster's nodes reach each other. (SECURITY.md)
#
# Run ./train.sh --check once where you submit: it makes .venv, if nodes have no access to the internet.
#
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# One process a node takes all of its GPUs; without the second # of this line: 4 of them. Several
# processes a node need --gpus-per-task instead.
##SBATCH --gpus-per-node=4
set -euo pipefail

max_restarts=100 # of preemptions, time limits and crashes together

say() { printf 'slurm.sh: %s\n' "$*" >&2; }
fail() { say "$@" && exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is a job's script; start it with: sbatch launch/slurm.sh"
cd "${SLURM_SUBMIT_DIR:-.}"
[ -x train.sh ] || fail "$PWD is not the project's folder; submit from there: sbatch launch/slurm.sh"

task=${SLURM_ARRAY_TASK_ID:-}
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${task:+_$task}
name=slurm-$job runs=runs seed='' kept=()
while [ $# -gt 0 ]; do
  case $1 in
    --run-name) name=${2:-}${task:+-$task} && shift ;;
    --run-name=*) name=${1#*=}${task:+-$task} ;;
    --runs-dir) runs=${2:-} && kept+=("$1" "$runs") && shift ;;
    --runs-dir=*) runs=${1#*=} && kept+=("$1") ;;
    --seed | --seed=*) seed=given && kept+=("$1") ;;
    *) kept+=("$1") ;;
  esac
  shift || true
done
set -- --run-name "$name" ${kept[@]+"${kept[@]}"}
# What differs between the tasks of an array is yours to choose here.
if [ -n "$task" ] && [ -z "$seed" ]; then set -- "$@" --seed "$task"; fi

mkdir -p "$runs/$name"
restarts=${SLURM_RESTART_COUNT:-0}
say "job $job on $SLURM_JOB_NODELIST, start $((restarts + 1)): $runs/$name/slurm.log"

# One address a process, in the order of Slurm's numbers. Ports follow from the job's number, so that jobs
# on one node do not meet.
addresses=() port=$((10000 + SLURM_JOB_ID * 97 % 20000))
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  for _ in $(seq "${SLURM_NTASKS_PER_NODE:-1}"); do addresses+=("$node:$((port++))"); done
done
workers=$(printf ', "%s"' "${addresses[@]}")
# What each process does: TF_CONFIG tells it of the others ($0), and which of them it is.
# shellcheck disable=SC2016
process='
  export TF_CONFIG="{\"cluster\": {\"worker\": [$0]}, \"task\": {\"type\": \"worker\", \"index\": $SLURM_PROCID}}"
  exec ./train.sh "$@"'
code=0
# --wait: where one process has ended, the others are given this long to find out (seconds).
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --distribution=block \
  --ntasks="$((SLURM_NNODES * ${SLURM_NTASKS_PER_NODE:-1}))" --ntasks-per-node="${SLURM_NTASKS_PER_NODE:-1}" \
  --kill-on-bad-exit=0 --wait=120 --output="$runs/$name/slurm.log" --open-mode=append \
  bash -c "$process" "${workers#, }" "$@" || code=$?

case $code in
  0) say "job $job is done" ;;
  1 | 2 | 130) say "job $job has failed with exit code $code: $runs/$name/slurm.log says why" ;;
  *)
    if [ "$restarts" -ge "$max_restarts" ]; then
      say "job $job ended with exit code $code, and was started again $restarts times: not once more"
    elif scontrol requeue "$job"; then
      say "job $job ended with exit code $code: back in the queue"
      sleep 60 # Slurm ends this script meanwhile
    fi
    ;;
esac
exit "$code"
