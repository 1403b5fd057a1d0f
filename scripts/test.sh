#!/usr/bin/env bash
# Every check of the project: style, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment compile,demo,test,tensorrt-rtx

.venv/bin/ruff check .
.venv/bin/ruff format --check .
mkdir -p .dev
ln -sfn .. .dev/speceyes
MYPYPATH=.dev .venv/bin/mypy -p speceyes
.venv/bin/pytest "$@"
