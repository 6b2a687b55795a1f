#!/usr/bin/env bash
# Trains the project in this folder: ./train.sh [SETTING...]. ./train.sh --help lists the settings.
#
# On the first start, and whenever pyproject.toml or uv.lock has changed, the script installs the
# packages into .venv. It uses uv, which writes uv.lock, if uv is installed; otherwise venv and pip.
# If pyproject.toml has the extras cpu and gpu, .venv gets TensorFlow for GPUs on a machine with an
# NVIDIA GPU, and otherwise TensorFlow for CPUs. The choice is made once, for all machines that share
# this folder. ACCELERATOR=gpu or ACCELERATOR=cpu makes another one.
#
# If an environment is active, or VENV=FOLDER is set, that environment is used, and nothing is
# installed. The exit code is 2 if there is no environment or a setting is wrong; otherwise, it is
# the exit code of the training.
set -euo pipefail
say() { printf 'train.sh: %s\n' "$*" >&2; }
fail() { say "$@" && exit 2; }
caller=$PWD env=${VENV:-${VIRTUAL_ENV:-}} uv=$(command -v uv || :)
CDPATH='' cd -- "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
pythons=$(sed -n 's/^requires-python = "\(.*\)".*/\1/p' pyproject.toml) # such as >=3.11,<3.14
range=v${pythons//,/ and v}                                             # v>=3.11 and v<3.14
fits() { "$1" -c "import sys; v = sys.version_info[1]; sys.exit(not (${range//3./}))" 2>/dev/null; }
make_environment() {
  [ -n "$uv" ] && uv venv --quiet --seed --clear .venv && return
  for python in python3.{20..11} python3; do
    fits "$python" && "$python" -m venv --clear .venv && return
  done
  fail "the project needs Python $pythons (pyproject.toml), and none is on the PATH (python3 is" \
    "$(python3 -V 2>/dev/null || echo absent)): install one, or install uv, which downloads one"
}
has_gpu() { # TensorFlow supports NVIDIA GPUs only in Linux on x86-64
  [ "$(uname -sm)" = "Linux x86_64" ] || return
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || [ -e /usr/lib/wsl/lib/libcuda.so.1 ] ||
    [[ "$(nvidia-smi -L 2>/dev/null)" = GPU* ]]
}
choose() { # sets extra, the extra of pyproject.toml that has TensorFlow; empty if there is none
  extra=''
  if [[ "$(<pyproject.toml)" != *$'\ngpu = ['* ]]; then
    [ -z "${ACCELERATOR:-}" ] || fail "ACCELERATOR is set, but pyproject.toml has no extras" \
      "cpu and gpu: change its dependency on TensorFlow instead"
    return 0
  fi
  installed=$(cat .venv/.accelerator 2>/dev/null || :)
  extra=${ACCELERATOR:-$installed}
  [[ $extra =~ ^(cpu|gpu|)$ ]] || fail "ACCELERATOR is '$extra': expected cpu or gpu"
  [ -n "$extra" ] || { has_gpu && extra=gpu || extra=cpu; }
}
state() { echo "$PWD${extra:+ $extra}" && cksum pyproject.toml uv.lock 2>/dev/null || :; } # with the folder, because .venv cannot be moved
install() {
  if ! mkdir .venv.lock 2>/dev/null; then
    [ -w . ] || fail "cannot write to $PWD"
    say "waiting for another train.sh, which is installing; if there is none, remove $PWD/.venv.lock"
    sleep 2 && return
  fi
  trap 'rmdir .venv.lock' EXIT
  trap 'exit 130' INT TERM # after pip has ended, so that no other train.sh installs at the same time
  choose # again, because another train.sh may have installed meanwhile
  [ "${installed:-$extra}" = "$extra" ] || make_environment # both builds have the same files
  fits .venv/bin/python || make_environment
  [ -z "$extra" ] || echo "$extra" >.venv/.accelerator
  command=(.venv/bin/python -m pip install --disable-pip-version-check --editable ".${extra:+[$extra]}")
  [ -z "$uv" ] || command=(uv sync --inexact --no-dev ${extra:+--extra "$extra"}) # --inexact keeps other packages
  [ -t 2 ] || command+=(--quiet)              # show the progress only in a terminal
  say "installing the packages of pyproject.toml${extra:+ and its extra $extra} into $PWD/.venv"
  "${command[@]}" || fail "the installation failed, see above; the next run tries it again"
  state >.venv/.installed
}
if [ -n "$env" ]; then
  [[ $env = /* ]] || env=$caller/$env
  fits "$env/bin/python" || fail "the environment $env has no Python $pythons (pyproject.toml):" \
    "pass another one with VENV=FOLDER, or deactivate it, so that .venv is created here"
  [ -z "${ACCELERATOR:-}" ] || say "ACCELERATOR has no effect: the environment $env is used as it is"
else
  env=$PWD/.venv
  until choose && [ "$(cat .venv/.installed 2>/dev/null)" = "$(state)" ] && [ -x "$env/bin/python" ]; do (install >&2); done
  [ "$extra" != gpu ] || has_gpu || say "this machine has no NVIDIA GPU for the TensorFlow in .venv: it uses the CPU"
fi
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}" # otherwise, the order of sets differs from process to process
exec "$env/bin/python" -m ctl_core train "$@" # exec: signals reach the training directly
