#!/bin/sh
# Training steps and inference of ViT-B shapes on one CUDA device in bfloat16, eager and compiled, with peak memory, as
# one table. Takes at most LIMIT seconds: what is not done by then is left out, what is done is in the table.
#
#     sh benchmarks/gpu.sh                                  # results in runs/gpu
#     OUT=results PYTHON=python3.12 sh benchmarks/gpu.sh
set -u

OUT=${OUT:-runs/gpu}
PYTHON=${PYTHON:-python}
LIMIT=${LIMIT:-300}
HERE=$(dirname "$0")

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh needs a CUDA device that PyTorch sees; on a CPU run benchmarks/inference.py and training_step.py." >&2
    exit 2
fi

mkdir -p "$OUT" || exit 1
rm -f "$OUT"/[1-6]-*.json "$OUT"/log.txt
END=$(($(date +%s) + LIMIT - 10)) # the last seconds are the table's

# run FILE SCRIPT OPTIONS...: results in FILE, rewritten after every configuration, so that a stop loses the last alone
run() {
    file=$1 script=$2 left=$((END - $(date +%s)))
    shift 2
    if [ "$left" -lt 5 ]; then
        echo "left out, no time: $file" >&2
        return
    fi
    timeout "$left" "$PYTHON" "$HERE/$script" --device cuda --dtypes bfloat16 --shapes vit-b \
        --output "$OUT/$file" "$@" >>"$OUT/log.txt" 2>&1 || echo "not finished: $file, see $OUT/log.txt" >&2
}

# Compiled last, the middle batch first: compiling takes longer than measuring.
run 1-inference.json inference.py --batch-sizes 8 32 64
run 2-training.json training_step.py --batch-sizes 8 32 64 --loop-steps 0
run 3-inference-compiled.json inference.py --batch-sizes 32 --compile
run 4-training-compiled.json training_step.py --batch-sizes 32 --compile --no-memory --loop-steps 0
run 5-inference-compiled.json inference.py --batch-sizes 8 64 --compile
run 6-training-compiled.json training_step.py --batch-sizes 8 64 --compile --no-memory --loop-steps 0

set -- "$OUT"/[1-6]-*.json
if [ ! -f "$1" ]; then
    echo "nothing was measured; see $OUT/log.txt" >&2
    exit 1
fi
"$PYTHON" "$HERE/timing.py" "$@" | tee "$OUT/table.md"
