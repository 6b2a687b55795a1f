#!/usr/bin/env bash
# Trains on a cluster with Slurm. Submit it from the project's folder, which all nodes must share:
#
#   sbatch launch/slurm.sh --run-name a --steps 10000
#   sbatch --array=0-4 launch/slurm.sh --run-name a     # five runs with different seeds, a-0 to a-4
#
# The arguments after the file name are settings, as for train.sh. The output of the training is in
# runs/NAME/slurm.log, and the output of this script in slurm-<job>.out.
#
# Before the time limit is reached, or if another job preempts this one, the run is saved, requeued and
# resumed. After a crash or the loss of a node, it is requeued, too, and resumes from its last checkpoint.
# If a hook or a setting fails, the job ends.
#
# Use it only in trusted networks: the port of each process has no password and no encryption, and anyone who
# can reach it can read and write files and run programs as you. Allow connections only between the nodes of
# the cluster. (SECURITY.md)
#
# If the nodes have no access to the internet, run ./train.sh --check once on the machine from which you
# submit. It creates .venv.{% if cookiecutter.accelerator == "auto" %} If only the nodes have GPUs, put ACCELERATOR=gpu before this command, also if
# the submitting machine has created .venv before.{% endif %}
#
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# By default, there is one process per node. It uses all GPUs that Slurm grants it. To request 4 GPUs per
# node, remove one # from the next line. For several processes per node, use --gpus-per-task instead.
##SBATCH --gpus-per-node=4
set -euo pipefail

max_restarts=100 # after preemptions, time limits and crashes together

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
# Here you can choose other settings that differ between the tasks of an array.
if [ -n "$task" ] && [ -z "$seed" ]; then set -- "$@" --seed "$task"; fi

mkdir -p "$runs/$name"
restarts=${SLURM_RESTART_COUNT:-0}
say "job $job on $SLURM_JOB_NODELIST, start $((restarts + 1)): $runs/$name/slurm.log"

# One address per process, in the order of Slurm's process numbers. The ports are derived from the job's
# number, so that two jobs on one node do not use the same port.
addresses=() port=$((10000 + SLURM_JOB_ID * 97 % 20000))
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  for _ in $(seq "${SLURM_NTASKS_PER_NODE:-1}"); do addresses+=("$node:$((port++))"); done
done
workers=$(printf ', "%s"' "${addresses[@]}")
# The command of each process. TF_CONFIG contains the addresses of all processes ($0) and its own index.
# shellcheck disable=SC2016
process='
  export TF_CONFIG="{\"cluster\": {\"worker\": [$0]}, \"task\": {\"type\": \"worker\", \"index\": $SLURM_PROCID}}"
  exec ./train.sh "$@"'
code=0
# --wait: after one process has ended, the others have this time to notice it and to end (seconds).
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --distribution=block \
  --ntasks="$((SLURM_NNODES * ${SLURM_NTASKS_PER_NODE:-1}))" --ntasks-per-node="${SLURM_NTASKS_PER_NODE:-1}" \
  --kill-on-bad-exit=0 --wait=120 --output="$runs/$name/slurm.log" --open-mode=append \
  bash -c "$process" "${workers#, }" "$@" || code=$?

case $code in
  0) say "job $job is done" ;;
  1 | 2 | 130) say "job $job has failed with exit code $code: $runs/$name/slurm.log says why" ;;
  *)
    if [ "$restarts" -ge "$max_restarts" ]; then
      say "job $job ended with exit code $code after $restarts restarts, the maximum; submit it again to continue"
    elif scontrol requeue "$job"; then
      say "job $job ended with exit code $code: back in the queue"
      sleep 60 # Slurm ends this script during this time
    fi
    ;;
esac
exit "$code"
