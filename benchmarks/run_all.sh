#!/usr/bin/env bash
# Every figure of docs/performance.md, on a machine with a GPU: `benchmarks/run_all.sh [directory]`, about eight minutes.
# Results go into the directory (default: benchmarks/results) under the name of the GPU in PREFIX (default: h200).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
prefix=$out/${PREFIX:-h200}
python=${PYTHON:-python3}
mkdir -p "$out"

"$python" -m sgray bench kernels --pdl --json "${prefix}_kernels.json"
"$python" -m sgray bench offline --model benchmarks/models/llama-3.1-8b --load-format dummy --skip-tokenizer-init \
    --context-length 40000 --json "${prefix}_offline.json"
"$python" -m sgray bench steps --model benchmarks/models/llama-3.1-8b --load-format dummy --skip-tokenizer-init \
    --context-length 40000 --json "${prefix}_steps.json"
"$python" benchmarks/http/run.py benchmarks/models/llama-3.1-8b-vocab-49152 --load-format dummy \
    --tokenizer-path "${TOKENIZER:-smollm2-135m-instruct}" --json "${prefix}_http.json"
