# Sourced by the other scripts: `environment EXTRAS` makes .venv with the package and those extras, once for each set.

environment() {
  local python=${PYTHON:-python3.11} stamp
  command -v "$python" > /dev/null || python=python3
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) found; Python 3.11 or newer is needed, name it with PYTHON=..." >&2
    return 1
  }
  stamp=.venv/.installed-$(cat pyproject.toml constraints.txt <(echo "$1") | sha256sum | cut -c 1-16)
  [ -e "$stamp" ] && return
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  echo "Installing speceyes[$1] into .venv"
  .venv/bin/pip install --quiet --constraint constraints.txt --editable ".[$1]"
  touch "$stamp"
}
