#!/usr/bin/env bash
# The runs behind findings of the papers' tables: one cell, with something changed.
#
#   benchmarks/evidence/papers_why.sh OUT [FINDING...]     FINDING: feddyn, feddf, shrinking, rows
#
# Every run is a folder in OUT; its summary.json has what it scores. JOBS run at once (one by
# default); on a GPU several share it best through CUDA's multi-process service.
# feddyn and feddf fit a CPU (a minute a round or less); the others want a GPU.
set -euo pipefail
out=$1
shift
mkdir -p "$out"
fedbasin=${FEDBASIN:-fedbasin}

cell() { # NAME TABLE ROW COLUMN: the config file that the next runs start from
    name=$1
    $fedbasin paper config "$2" --row "$3" --column "$4" >"$out/$name.toml"
}

try() { # CHANGE [OPTION...]: run the cell with options, in a folder of its own
    local folder="$out/$name, $1"
    shift
    while (($(jobs -rp | wc -l) >= ${JOBS:-1})); do wait -n; done
    { $fedbasin run "$out/$name.toml" --out "$folder" "$@" || echo "failed: $folder" >&2; } &
}

feddyn() { # FedLAW's Table 3: does FedDyn diverge by the clients' momentum?
    cell feddyn fedlaw/table3 feddyn "fmnist mlp a0.1"
    try "momentum 0" --rounds 40 --set local.momentum=0.0
}

feddf() { # FedLAW's Table 3: does FedDF collapse by the server's optimiser?
    cell feddf fedlaw/table3 feddf "fmnist lenet a0.1"
    try "adam 1e-4" --rounds 50 --set "method=feddf(lr=0.0001, betas=(0.5, 0.999), cosine=False, clip=0.0)"
    try "sgd 0.08" --rounds 50 \
        --set "method=feddf(optimiser='sgd', lr=0.08, betas=(0.9, 0.999), cosine=False, clip=0.0)"
}

kept() { # METHOD DECAY [OPTION...]: the clients' momentum lives through the run
    local rule="kept_momentum(beta=0.9, decay=$2)" method=$1
    shift 2
    try "kept momentum" --set "method=${method//RULE/$rule}" --set local.momentum=0.0 \
        --set local.weight_decay=0.0 "$@"
}

shrinking() { # FedLAW's Table 1: what moves FedAvg, and the end of strong shrinking?
    for gamma in 1 0.9; do
        cell "gamma $gamma" fedlaw/table1 "simplecnn iid" "gamma $gamma"
        try "all rows" --set partition.hold_out=0.0
        try "constant lr" --set local.schedule=constant
        kept "fedlaw(learn='none', gamma=$gamma, local=RULE)" 0.0005
    done
}

rows() { # FedLAW's Table 3, CIFAR-10: is it the rows held out, or the momentum that is kept?
    for alpha in 100 0.1; do
        cell "fedavg a$alpha" fedlaw/table3 fedavg "cifar10 cnn a$alpha"
        kept "fedavg(local=RULE)" 0.0005
    done
}

[[ $# -gt 0 ]] || set -- feddyn feddf
for finding in "$@"; do "$finding"; done
wait
