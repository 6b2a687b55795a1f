#!/usr/bin/env bash
# Trains the project in this folder: ./train.sh [SETTING...]; ./train.sh --help lists them.
#
# On first use it makes the environment .venv here and installs what pyproject.toml asks for, by uv
# where that is installed. An active virtual environment, or one named by VENV=FOLDER, is used as it
# is: nothing is installed there.
#
# --background trains on when the terminal is closed: runs/NAME/train.log has what it says, and
# runs/NAME/pid is the process to kill, which saves the run first.
#
# Exit code 2: there is no environment to train in. Otherwise the exit code of the training.
set -euo pipefail

say() { printf 'train.sh: %s\n' "$*" >&2; }
fail() { say "$@" && exit 2; }

unset CDPATH # with it, cd prints where it goes
caller=$PWD
cd -- "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

# Such as >=3.11,<3.14.
pythons=$(sed -n 's/^requires-python = "\(.*\)".*/\1/p' pyproject.toml)
fits() {
  "$1" -c 'import re, sys; sys.exit(not all(eval(f"{sys.version_info[:2]} {op} (3, {minor})")
    for op, minor in re.findall(r"([<>]=?) *3\.(\d+)", sys.argv[1])))' "$pythons" 2>/dev/null
}

make_environment() {
  local minor
  if command -v uv >/dev/null; then
    uv venv --quiet --seed --clear --python "$pythons" .venv
    return
  fi
  for minor in .{20..11} ""; do
    if fits "python3$minor"; then
      "python3$minor" -m venv --clear .venv
      return
    fi
  done
  fail "the project needs Python $pythons (pyproject.toml), and none is on the PATH (python3 is" \
    "$(python3 -V 2>/dev/null || echo absent)): install one, or uv, which gets one by itself"
}

install() {
  local quiet=--quiet installer=(.venv/bin/python -m pip install --disable-pip-version-check)
  if command -v uv >/dev/null; then installer=(uv pip install --python .venv); fi
  if [ -t 2 ]; then quiet=; fi # progress is for a terminal
  fits .venv/bin/python || make_environment >&2 || fail "the environment could not be made (see above)"
  say "installing what pyproject.toml asks for into $PWD/.venv"
  "${installer[@]}" ${quiet:+"$quiet"} --editable . >&2 ||
    fail "the installation failed (see above); the next run repeats it"
  echo "$wanted" >.venv/.installed
}

env=${VENV:-${VIRTUAL_ENV:-}}
if [ -n "$env" ]; then
  case $env in /*) ;; *) env=$caller/$env ;; esac
  none="use none"
  [ -n "${VENV:-}" ] || none="deactivate it"
  fits "$env/bin/python" || fail "the environment $env has no Python $pythons (pyproject.toml):" \
    "name another with VENV=FOLDER, or $none, and .venv is made here"
else
  env=$PWD/.venv
  wanted="$(cksum <pyproject.toml) $PWD" # where the environment lies is written into it
  ready() { [ -x .venv/bin/python ] && [ "$(cat .venv/.installed 2>/dev/null)" = "$wanted" ]; }
  if ! ready; then
    until mkdir .venv.lock 2>/dev/null; do
      [ -d .venv.lock ] || fail "cannot write to $PWD"
      say "waiting for another train.sh that installs; if there is none, remove $PWD/.venv.lock"
      sleep 2
    done
    trap 'rmdir .venv.lock' EXIT
    trap 'exit 130' INT # when pip has ended, so that nobody else installs meanwhile
    trap 'exit 143' TERM
    ready || install
    trap - EXIT INT TERM
    rmdir .venv.lock
  fi
fi

background=''
for word in "$@"; do
  shift
  if [ "$word" = --background ]; then background=yes; else set -- "$@" "$word"; fi
done
[ -n "$background" ] || exec "$env/bin/python" -m ctl_core train "$@" # which signals reach directly

run=$(date +%Y%m%d-%H%M%S)
if [[ " $* " =~ " --run-name"[=\ ]([^ ]+) ]]; then run=${BASH_REMATCH[1]}; else set -- "$@" --run-name "$run"; fi
run=runs/$run
mkdir -p "$run"
flock -n "$run/train.log" true 2>/dev/null || [ $? != 1 ] || fail "another process trains $run"
set -m # a process group of its own: Ctrl-C does not reach it, nor, by nohup, the terminal's end
PYTHONUNBUFFERED=1 nohup "$env/bin/python" -m ctl_core train "$@" \
  </dev/null >>"$run/train.log" 2>&1 &
echo $! >"$run/pid"
say "process $! trains $run: tail -f $run/train.log; kill $! saves and ends it"
