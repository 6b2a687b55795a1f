#!/usr/bin/env bash
# Trains the project in this folder: ./train.sh [SETTING...]; ./train.sh --help lists them.
# At first, and when pyproject.toml or uv.lock has changed, it installs into .venv: by uv where there
# is one, which writes uv.lock, otherwise by venv and pip. An active environment, or VENV=FOLDER, is
# used as it is. Exit code 2: no environment, or a wrong setting; others: the training's.
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
    "$(python3 -V 2>/dev/null || echo absent)): install one, or uv, which gets one by itself"
}
state() { pwd && cksum pyproject.toml uv.lock 2>/dev/null || :; } # .venv works in one folder only
install() {
  if ! mkdir .venv.lock 2>/dev/null; then
    [ -w . ] || fail "cannot write to $PWD"
    say "waiting for another train.sh that installs; if there is none, remove $PWD/.venv.lock"
    sleep 2 && return
  fi
  trap 'rmdir .venv.lock' EXIT
  trap 'exit 130' INT TERM # when pip has ended, so that nobody else installs meanwhile
  fits .venv/bin/python || make_environment
  command=(.venv/bin/python -m pip install --disable-pip-version-check --editable .)
  [ -z "$uv" ] || command=(uv sync --inexact --no-dev) # --inexact keeps other packages
  [ -t 2 ] || command+=(--quiet)              # progress is for a terminal
  say "installing what pyproject.toml asks for into $PWD/.venv"
  "${command[@]}" || fail "the installation failed (see above); the next run repeats it"
  state >.venv/.installed
}
if [ -n "$env" ]; then
  [[ $env = /* ]] || env=$caller/$env
  fits "$env/bin/python" || fail "the environment $env has no Python $pythons (pyproject.toml):" \
    "name another with VENV=FOLDER, or deactivate it, and .venv is made here"
else
  env=$PWD/.venv
  until [ "$(cat .venv/.installed 2>/dev/null)" = "$(state)" ] && [ -x "$env/bin/python" ]; do (install >&2); done
fi
exec "$env/bin/python" -m ctl_core train "$@" # which signals reach directly
