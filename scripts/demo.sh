#!/usr/bin/env bash
# Trains the same CNN with PyTorch and with Keras, three times each, on two ranks of this machine, then compares the
# runs. Arguments are passed on to both examples.
set -euo pipefail

cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
# TensorFlow, which horovodrun loads too, otherwise tells about its CPU features.
export TF_CPP_MIN_LOG_LEVEL=2

# Ranks write to a pipe of horovodrun's, so only here is known whether someone watches.
bar=()
if [ -t 2 ]; then bar=(--progress-bar); fi

runs=()
run() {
    local example=$1 name=$2 what=$3
    shift 3
    runs+=("results/$name.json")
    echo
    echo "${#runs[@]}/6 $what: $(basename "$example") $*"
    horovodrun --gloo -np 2 python "examples/$example" "$@" --output "results/$name.json" "${bar[@]}" < /dev/null
}

pytorch=pytorch/pytorch_digits.py
keras=tensorflow2/tensorflow2_keras_digits.py
rm -f results/{pytorch,keras}_{uncompressed,fp16,twobit}.json results/loss.png
run $pytorch pytorch_uncompressed "PyTorch, uncompressed" "$@"
run $pytorch pytorch_fp16 "PyTorch, fp16" --fp16-allreduce "$@"
run $pytorch pytorch_twobit "PyTorch, TwoBit" --twobit-allreduce "$@"
run $keras keras_uncompressed "Keras, uncompressed" "$@"
run $keras keras_fp16 "Keras, fp16" --fp16-allreduce "$@"
run $keras keras_twobit "Keras, TwoBit" --twobit-allreduce "$@"
echo
python examples/report.py "${runs[@]}" --png results/loss.png
