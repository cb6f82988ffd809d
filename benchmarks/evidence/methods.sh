#!/usr/bin/env bash
# The methods at the heart against FedAvg on Fashion-MNIST, at reduced rounds, 3 seeds.
#
#   benchmarks/evidence/methods.sh OUT SETTING...      SETTING: skew, few, tail
#
# Needs FEDBASIN_DATA or the network; meant for a GPU. ROUNDS and JOBS (runs at once) can be set.
# Prints a table for each setting; OUT/results.jsonl holds a line for each finished run.
set -euo pipefail
out=$1
shift
compare=(${FEDBASIN:-fedbasin} compare --preset fmnist --rounds "${ROUNDS:-100}" --seeds 0,1,2
    --jobs "${JOBS:-4}" --set sim.checkpoint_every=1000)

skew() { # FedIMA's setting: 100 clients, Dirichlet(0.1), 10 a round, 5 epochs, batch 50, momentum
    "${compare[@]}" fedavg ima "wima(window=20)" scaffold fedlaw fedcda \
        --set data.proxy_per_class=10 --target 0.75 --out "$out/skew"
}

few() { # FedCDA's setting: 20 clients, 4 a round, 20 epochs of small steps without momentum
    "${compare[@]}" fedavg fedcda "fedcda(strategy='newest')" "fedcda(strategy='exact')" \
        --set partition.clients=20 --set "sim.participation=fraction(rate=0.2)" \
        --set local.epochs=20 --set local.batch=64 --set local.lr=0.001 --set local.momentum=0.0 \
        --set local.weight_decay=1e-5 --set local.schedule=constant --target 0.6 --out "$out/few"
}

tail() { # a long tail (imbalance 0.05), clients of equal size, no momentum, lr 0.1
    "${compare[@]}" "fedavg(weighting='uniform')" fedcm fedwcm \
        --set data.imbalance=0.05 --set "partition.how=client_dirichlet(alpha=0.1)" \
        --set local.momentum=0.0 --set local.lr=0.1 --set local.clip=10.0 \
        --set "local.schedule=exponential(decay=0.998)" --target 0.6 --out "$out/tail"
}

for setting in "$@"; do "$setting"; done
python3 "$(dirname "$0")/gather.py" "$out" >"$out/results.jsonl"
