#!/usr/bin/env bash
# The methods at the heart against FedAvg on Fashion-MNIST and CIFAR-10, at reduced rounds, 3 seeds.
#
#   benchmarks/evidence/methods.sh OUT PART...      PART: skew, few, tail, cifar
#
# Needs FEDBASIN_DATA or the network; meant for a GPU. Methods run at their defaults and proxy rows
# are cut from the training rows: nothing is chosen on test rows. The same command goes on where it
# was stopped: finished runs are kept. After each command OUT/results.jsonl is written anew with a
# line for each finished run; `fedbasin report OUT/skew` makes a page of all seeds of a part.
#
# ROUNDS (100, for cifar see there), SEEDS ("0 1 2") and JOBS (4 runs at once) can be set. LIMIT
# (seconds, 3600) is when no further command is begun. ARGS is added to every command, for a trial:
#
#   ROUNDS=2 SEEDS=0 JOBS=1 ARGS="--set model=logistic --set local.epochs=1" methods.sh /tmp/try cifar
set -euo pipefail
out=$1
shift
mkdir -p "$out"

# run FOLDER PRESET ROUNDS METHOD... OPTION...: the seeds one after another, so that a run that is
# stopped leaves whole comparisons.
run() {
    local folder=$1 preset=$2 rounds=$3 seed
    shift 3
    for seed in ${SEEDS:-0 1 2}; do
        if ((SECONDS > ${LIMIT:-3600})); then
            echo "not begun: $folder, seed $seed"
            return
        fi
        # shellcheck disable=SC2086  (FEDBASIN and ARGS may be several words)
        ${FEDBASIN:-fedbasin} compare --preset "$preset" --rounds "${ROUNDS:-$rounds}" \
            --seeds "$seed" --jobs "${JOBS:-4}" --set sim.checkpoint_every=1000 "$@" ${ARGS:-} \
            --out "$out/$folder" || echo "failed: $folder, seed $seed" # the others go on
        gather
        echo "$SECONDS s: $folder, seed $seed"
    done
}

gather() {
    local part="$out/results.$BASHPID" # several may gather at once
    python3 "$(dirname "$0")/gather.py" "$out" >"$part"
    mv "$part" "$out/results.jsonl"
}

skew() { # FedIMA's setting: 100 clients, Dirichlet(0.1), 10 a round, 5 epochs, batch 50, momentum
    run skew fmnist 100 fedavg ima "wima(window=20)" scaffold fedlaw fedcda \
        --set data.proxy_per_class=10 --reach 0.75
}

few() { # FedCDA's setting: 20 clients, 4 a round, 20 epochs of small steps without momentum
    run few fmnist 100 fedavg fedcda "fedcda(strategy='newest')" "fedcda(strategy='exact')" \
        --set partition.clients=20 --set "sim.participation=fraction(rate=0.2)" \
        --set local.epochs=20 --set local.batch=64 --set local.lr=0.001 --set local.momentum=0.0 \
        --set local.weight_decay=1e-5 --set local.schedule=constant --reach 0.6
}

tail() { # a long tail (imbalance 0.05), clients of equal size, no momentum, lr 0.1
    run tail fmnist 100 "fedavg(weighting='uniform')" fedcm fedwcm \
        --set data.imbalance=0.05 --set "partition.how=client_dirichlet(alpha=0.1)" \
        --set local.momentum=0.0 --set local.lr=0.1 --set local.clip=10.0 \
        --set "local.schedule=exponential(decay=0.998)" --reach 0.6
}

# CIFAR-10 with FedIMA's CNN, each method where its paper claims a gain: 36 runs, 12 at once, about
# 6 minutes of an H200. Seconds in brackets are estimates for one run alone: 15 s to start and 0.2 ms
# a client-step. Seed by seed, so that what is stopped leaves whole comparisons.
cifar() {
    local seed
    for seed in ${SEEDS:-0 1 2}; do
        for part in cifar_skew cifar_tail cifar_silo cifar_few; do SEEDS=$seed $part & done
        wait
    done
}

cifar_skew() { # (15 + 20 s) FedIMA and WIMA: the preset at half of FedIMA's 400 rounds
    run cifar_skew cifar10 200 fedavg ima "wima(window=50)" --reach 0.5 \
        --set sim.evaluate_every=5
}

cifar_tail() { # (15 + 10 s) FedWCM: imbalance 0.1, equal shares, a fifth of its 500 rounds
    run cifar_tail cifar10 100 "fedavg(weighting='uniform')" fedcm fedwcm --reach 0.4 \
        --set data.imbalance=0.1 --set "partition.how=client_dirichlet(alpha=0.1)" \
        --set local.momentum=0.0 --set local.lr=0.1 --set local.clip=10.0 \
        --set "local.schedule=exponential(decay=0.998)" --set sim.evaluate_every=5
}

cifar_silo() { # (15 + 30 s) FedLAW: 20 clients, all in every round, 3 epochs, a fifth of 200 rounds
    run cifar_silo cifar10 40 fedavg fedlaw "fedlaw(guard=0)" --reach 0.5 \
        --set data.proxy_per_class=10 --set data.normalise=symmetric \
        --set "partition.how=class_dirichlet(alpha=0.1)" --set partition.clients=20 \
        --set partition.seed=-1 --set "sim.participation=fraction(rate=1.0)" \
        --set local.lr=0.08 --set local.epochs=3 --set local.batch=128 \
        --set local.weight_decay=5e-4 --set sim.evaluate_every=5
}

cifar_few() { # (15 + 25 s) FedCDA: 20 clients, 4 a round, 20 epochs of small steps, 40 of 200 rounds
    run cifar_few cifar10 40 fedavg fedcda "fedcda(strategy='newest')" --reach 0.3 \
        --set partition.clients=20 --set "sim.participation=fraction(rate=0.2)" \
        --set local.epochs=20 --set local.batch=64 --set local.lr=0.001 --set local.momentum=0.0 \
        --set local.weight_decay=1e-5 --set local.schedule=constant --set sim.evaluate_every=5
}

for part in "$@"; do "$part"; done
