#!/usr/bin/env bash
# Train the demonstration model's predictor and put it into scripts/demo/predictor: pictures, the model's answers, training.
# Interrupted, it goes on where it was. Arguments go to `speceyes-compile train-predictor`.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/environment.sh
environment compile,demo

checkpoint=scripts/demo/checkpoint
requests=build/demo-requests
work=build/demo-predictor.work
# Traces belong to one checkpoint; another one gets a folder of its own.
stamp=$(cat $checkpoint/*.json $checkpoint/*.safetensors $checkpoint/*.jinja | sha256sum | cut -c 1-12)

[ -e $requests/requests.jsonl ] || .venv/bin/python -m scripts.demo.requests --count 2000 --out $requests
.venv/bin/speceyes-compile train-predictor $checkpoint --data $requests -o scripts/demo/predictor \
  --work $work/"$stamp" --window 5 --epochs 10 --max-new-tokens 192 "$@"
