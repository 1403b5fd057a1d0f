#!/usr/bin/env bash
# From a fresh clone to answers: installs into .venv, compiles the demonstration model, asks it about a few pictures.
# What is done already is skipped; delete build/demo.speceyes to compile again.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment compile

bundle=build/demo.speceyes
if [ -e $bundle/manifest.json ]; then
  echo "$bundle is there already"
else
  echo "Compiling scripts/demo/checkpoint into $bundle"
  .venv/bin/speceyes-compile build scripts/demo/checkpoint -o $bundle --predictor scripts/demo/predictor
fi
.venv/bin/python scripts/ask_samples.py $bundle scripts/demo/samples
echo
echo "Ask your own: .venv/bin/speceyes-compile ask $bundle --image PICTURE \"QUESTION\""
