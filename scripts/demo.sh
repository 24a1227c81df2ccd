#!/usr/bin/env bash
# Trains the same model three times on two ranks of this machine, then compares the runs. Arguments are passed on to
# the example.
set -euo pipefail

cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
# horovodrun loads TensorFlow, which otherwise tells about its CPU features.
export TF_CPP_MIN_LOG_LEVEL=2

# Ranks write to a pipe of horovodrun's, so only here is known whether someone watches.
bar=()
if [ -t 2 ]; then bar=(--progress-bar); fi

run() {
    local name=$1 what=$2
    shift 2
    echo
    echo "$what: pytorch_digits.py $*"
    horovodrun --gloo -np 2 python examples/pytorch/pytorch_digits.py "$@" --output "results/$name.json" \
        "${bar[@]}" < /dev/null
}

rm -f results/{uncompressed,fp16,twobit}.json results/loss.png
run uncompressed "1/3 uncompressed" "$@"
run fp16 "2/3 fp16" --fp16-allreduce "$@"
run twobit "3/3 TwoBit" --twobit-allreduce "$@"
echo
python examples/report.py results/{uncompressed,fp16,twobit}.json --png results/loss.png
