#!/usr/bin/env bash
# Trains the project in this folder: ./train.sh [SETTING...]; ./train.sh --help lists them.
#
# On first use it makes the environment .venv here and installs what pyproject.toml asks for.
# With a virtual environment active, or one named by VENV=FOLDER, it uses that one, and installs
# only what is missing there. Once installed, no network is needed.
#
# Exit code 2: there is no environment to train in. Otherwise the exit code of the training.
set -euo pipefail

say() { printf 'train.sh: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 2
}

# The folder of this file, behind any symlinks. macOS has no readlink -f before 12.3.
caller=$PWD
self=${BASH_SOURCE[0]}
while [ -L "$self" ]; do
  link=$(readlink "$self")
  case $link in
    /*) self=$link ;;
    *) self=$(dirname "$self")/$link ;;
  esac
done
# With CDPATH set, cd may go elsewhere and prints where.
unset CDPATH
cd -- "$(dirname "$self")"
project=$(pwd -P)

if [ -n "${VENV:-}" ]; then
  kind=named
  env=$VENV
  case $env in /*) ;; *) env=$caller/$env ;; esac
elif [ -n "${VIRTUAL_ENV:-}" ]; then
  kind=active
  env=$VIRTUAL_ENV
else
  kind=own
  env=$project/.venv
fi
env=${env%/}
python=$env/bin/python
lock=$env.lock
# Written after an install, so that an interrupted one is repeated. Projects that share an
# environment have a stamp each.
stamp=$env/.train-sh-$(printf '%s' "$project" | cksum | cut -d ' ' -f 1)
wanted="$(cksum <pyproject.toml) $project"

installed() { [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; }

# Prints the requirements of pyproject.toml that the environment does not meet, one a line.
# Any build of TensorFlow counts as TensorFlow, and is never replaced by another.
missing() {
  "$python" - <<'PYTHON' 2>/dev/null
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement

BUILDS = ["tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly"]


def meets(text, extra=""):
    need = Requirement(text)
    if need.marker and not need.marker.evaluate({"extra": extra}):
        return True, ""
    for name in BUILDS if need.name in BUILDS else [need.name]:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        fits = need.specifier.contains(found, prereleases=True)
        if name in BUILDS:
            return fits, f"{name}{need.specifier}"
        parts = [(part, each) for each in need.extras for part in requires(name) or []]
        return fits and all(meets(*part)[0] for part in parts), text
    return False, text


with open("pyproject.toml", "rb") as file:
    dependencies = tomllib.load(file)["project"]["dependencies"]
for dependency in dependencies:
    met, instead = meets(dependency)
    if not met:
        print(instead)
PYTHON
}

# The Pythons that will do, as pyproject.toml has them, such as ">=3.11,<3.14".
pythons=$(sed -n 's/^requires-python = "\(.*\)".*/\1/p' pyproject.toml)
oldest=${pythons#*>=3.}
oldest=${oldest%%[!0-9]*}
too_new=${pythons#*<3.}
too_new=${too_new%%[!0-9]*}

# Whether $1 is one of them.
will_do() {
  "$1" -c "import sys; sys.exit(not (3, ${oldest:-0}) <= sys.version_info[:2] < (3, ${too_new:-99}))" \
    2>/dev/null
}

# Prints the first Python that will do.
find_python() {
  local candidate candidates=(python3) minor
  for ((minor = ${too_new:-20} - 1; minor >= ${oldest:-0}; minor--)); do
    candidates+=("python3.$minor")
  done
  for candidate in "${candidates[@]}" python; do
    if will_do "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# Makes the environment unless it is there.
make_environment() {
  local base found
  if [ -x "$python" ]; then
    if command -v uv >/dev/null || "$python" -c 'import pip' 2>/dev/null; then
      will_do "$python" || fail "the environment $env has $("$python" -V 2>&1), but the project" \
        "needs Python $pythons (pyproject.toml): remove it, or name another with VENV=FOLDER"
      return
    fi
  fi
  if [ "$kind" = active ]; then
    fail "the active environment $env has no working Python with pip: deactivate it or mend it"
  elif [ "$kind" = named ] && [ -n "$(ls -A "$env" 2>/dev/null)" ]; then
    fail "VENV=$env has no working Python with pip: name an environment, or a folder to be made"
  fi
  # What an interrupted start left; a named folder is empty here.
  if [ "$kind" = own ]; then rm -rf "$env"; fi
  if command -v uv >/dev/null; then
    say "making the environment $env"
    uv venv --quiet --seed --python "$pythons" "$env" >&2 ||
      fail "uv could not make the environment $env (see above)"
    return
  fi
  if ! base=$(find_python); then
    found=$(python3 -V 2>/dev/null) || found=absent
    fail "the project needs Python $pythons (pyproject.toml), and none is on the PATH (python3 is" \
      "$found): install one, or uv, which gets one by itself"
  fi
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$base has no venv module: install it (Debian, Ubuntu: apt install python3-venv), or uv"
  say "making the environment $env"
  "$base" -m venv "$env" >&2 || fail "$base could not make the environment $env (see above)"
}

pip_install() {
  # Progress is for a terminal; errors are shown either way.
  if [ ! -t 2 ]; then set -- --quiet "$@"; fi
  if command -v uv >/dev/null; then
    set -- uv pip install --python "$python" "$@"
  else
    set -- "$python" -m pip install --disable-pip-version-check "$@"
  fi
  "$@" >&2 || fail "the installation into $env failed (see above); the next run repeats it"
}

install() {
  local lines line
  local packages=()
  make_environment
  echo unfinished >"$stamp" || fail "cannot write to the environment $env"
  # Without the means to tell what is missing, pip finds out.
  lines=$(missing) || lines="--editable=."
  while IFS= read -r line; do
    if [ -n "$line" ]; then packages+=("$line"); fi
  done <<<"$lines"
  say "installing what pyproject.toml asks for into $env"
  if [ -n "$lines" ]; then pip_install "${packages[@]}"; fi
  # The project itself, for the command ctl.
  pip_install --no-deps --editable .
  echo "$wanted" >"$stamp"
}

# Only one train.sh at a time installs. The lock names its owner, so that one that was killed
# does not hold it for ever.
take_lock() {
  local owner told=
  mkdir -p "$(dirname "$lock")" || fail "cannot make the folder of $env"
  until mkdir "$lock" 2>/dev/null; do
    [ -d "$lock" ] || fail "cannot write beside the environment $env"
    owner=$(cat "$lock/owner" 2>/dev/null || true)
    if [ "${owner% *}" = "$(uname -n)" ] && ! kill -0 "${owner##* }" 2>/dev/null; then
      # Renaming works for one of several that notice this at once.
      mv "$lock" "$lock.$$" 2>/dev/null && rm -rf "$lock.$$"
      continue
    fi
    if [ -z "$told" ]; then
      told=yes
      say "waiting for another train.sh that installs (${owner:-unknown}; is it gone? remove $lock)"
    fi
    sleep 1
  done
  trap 'rm -rf "$lock"' EXIT
  # Ends only after pip has, so that nobody else installs meanwhile.
  trap 'exit 130' INT
  trap 'exit 143' TERM
  echo "$(uname -n) $$" >"$lock/owner"
}

if ! installed; then
  # An environment that someone else made may have all that is needed: then it is left alone.
  if [ "$kind" = own ] || [ -e "$stamp" ] || ! lines=$(missing) || [ -n "$lines" ]; then
    take_lock
    if ! installed; then install; fi
    rm -rf "$lock"
    trap - EXIT INT TERM
  fi
fi

# exec: signals reach the training directly.
exec "$python" -m ctl_core train "$@"
