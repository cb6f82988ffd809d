#!/usr/bin/env bash
# The runs behind findings of the papers' tables: one cell, with something changed.
#
#   benchmarks/evidence/papers_why.sh OUT [FINDING...]     FINDING: feddyn, feddf, collapse, shrinking, distilled,
#                                                          tuned, shifted, precision, slow, shrunk,
#                                                          averaged, split, pulled, taught, generated,
#                                                          perturbed, refilled, mild, best, counted, evened
#
# Every run is a folder in OUT; its summary.json has what it scores, its rounds.jsonl each round. JOBS run at once (one by
# default); on a GPU several share it best through CUDA's multi-process service.
# evened takes a CPU seconds; feddyn, feddf and collapse fit one (a minute a round or less); the others want a GPU.
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

feddf() { # FedLAW's Table 3: do FedDF and FedBE collapse by the server's optimiser?
    cell feddf fedlaw/table3 feddf "fmnist lenet a0.1"
    try "adam 1e-4" --rounds 50 --set "method=feddf(lr=0.0001, betas=(0.5, 0.999), cosine=False, clip=0.0)"
    try "sgd 0.08" --rounds 50 \
        --set "method=feddf(optimiser='sgd', lr=0.08, betas=(0.9, 0.999), cosine=False, clip=0.0)"
    cell fedbe fedlaw/table3 fedbe "fmnist lenet a0.1"
    try "sgd 0.08" --rounds 50 --set "method=fedbe(samples=1, mix='logits', temperature=1.0, epochs=100, \
optimiser='sgd', lr=0.08, betas=(0.9, 0.999), average_every=0)"
}

evened() { # FLamby's heart disease: does SCAFFOLD lose by the plain mean over clients in its variate?
    cell evened flamby/heart-disease fedavg centres
    for seed in 42 43 44 45 46; do
        try "uniform weights, seed $seed" --set "method=fedavg(weighting='uniform')" \
            --set seed=$seed --set partition.seed=$seed
    done
}

fresh() { # CHANGE METHOD [OPTION...]: without the momentum that lives through the run
    local change=$1 method=$2
    shift 2
    try "$change" --set "method=$method" --set local.momentum=0.9 --set local.weight_decay=0.0005 "$@"
}

shrinking() { # FedLAW's Table 1: what moves FedAvg, and the end of strong shrinking?
    for gamma in 1 0.9; do
        cell "gamma $gamma" fedlaw/table1 "simplecnn iid" "gamma $gamma"
        try "constant lr" --set local.schedule=constant
        fresh "fresh momentum, constant lr" "fedlaw(learn='none', gamma=$gamma)" \
            --set local.schedule=constant
        fresh "fresh momentum, all rows" "fedlaw(learn='none', gamma=$gamma)" \
            --set partition.hold_out=0.0
    done
}

collapse() { # FedLAW's Table 3, CIFAR-10: does kept momentum save it from shrinking to nothing?
    cell "fedlaw a0.1" fedlaw/table3 fedlaw "cifar10 cnn a0.1"
    fresh "fresh momentum" "fedlaw(lr=0.01, guard=0)" --rounds 40
}

distilled() { # FedLAW's Table 3, CIFAR-10: is it the server's optimiser?
    for alpha in 100 0.1; do
        cell "feddf a$alpha" fedlaw/table3 feddf "cifar10 cnn a$alpha"
        try "sgd 0.08" --set "method=feddf(fedavg(local=kept_momentum(decay=0.0005)), optimiser='sgd', \
lr=0.08, betas=(0.9, 0.999), cosine=False, clip=0.0)"
    done
}

tuned() { # the same of Server-FT
    cell "serverft a0.1" fedlaw/table3 serverft "cifar10 cnn a0.1"
    try "sgd 0.08" --set "method=serverft(fedavg(local=kept_momentum(decay=0.0005)), \
optimiser='sgd', lr=0.08, betas=(0.9, 0.999))"
}

shifted() { # the same table: is FedDyn scored at the model it sends, and weighted by rows?
    cell "feddyn a0.1" fedlaw/table3 feddyn "cifar10 cnn a0.1"
    try "as sent" --set "method=feddyn(alpha=0.01, score='server', weighting='samples', \
local=kept_momentum(decay=0.0005))"
}

precision() { # what bf16 changes: the same cell in tf32
    cell "fedavg shards2" fedcda/table1 fedavg "fmnist shards2"
    try "tf32" --set sim.precision=tf32
}

slow() { # FedCDA's Table 1: is SGD's momentum of 1e-4 a misprint?
    for where in "fedavg dir0.5" "fedcda dir0.5" "fedavg shards4" feddf\ {shards8,dir0.1}; do
        cell "$where" fedcda/table1 "${where% *}" "fmnist ${where#* }"
        try "momentum 0.9" --set local.momentum=0.9
    done
}

shrunk() { # the same table: is it gamma that FedLAW fails by?
    for column in shards2 dir0.5; do
        cell "fedlaw $column" fedcda/table1 fedlaw "fmnist $column"
        try "gamma 1" --rounds 100 --set "method=fedlaw(learn='lambda', guard=0)"
    done
    cell "fedlaw shards2" fedcda/table1 fedlaw "fmnist shards2"
    try "guarded" --rounds 100 --set method=fedlaw
}

averaged() { # the same table: is FedExP ahead because the mean of its last two models is scored?
    for column in shards4 shards8; do
        cell "fedexp $column" fedcda/table1 fedexp "fmnist $column"
        try "last model" --set "method=fedexp(average=False)"
    done
}

split() { # the same table: are Dirichlet splits not made within groups of ten clients?
    cell "fedavg dir0.5" fedcda/table1 fedavg "fmnist dir0.5"
    try "one group" --set "partition.how=dirichlet(alpha=0.5)"
    try "even weights" --set "method=fedavg(weighting='uniform')"
}

pulled() { # the same table: FedProx is 4 points behind FedAvg there; is its mu larger than 0.01?
    for column in shards8 dir0.5; do
        cell "fedprox $column" fedcda/table1 fedprox "fmnist $column"
        for mu in 1 10; do try "mu $mu" --set "method=fedprox(mu=$mu)"; done
    done
}

taught() { # the same table: is FedDF's Adam at 0.001 too fast for ten rows a class, or are these too few?
    cell "feddf shards8" fedcda/table1 feddf "fmnist shards8"
    try "adam 1e-4" --set "method=feddf(lr=0.0001)"
    try "500 a class" --rounds 100 --set "method=feddf(epochs=5)" --set data.proxy_per_class=500
    # How far is the clients' ensemble ahead of their mean? fedbasin analyze averaging RUN --rows 0
    cell "fedavg shards8" fedcda/table1 fedavg "fmnist shards8"
    try "kept cohort" --rounds 100 --set "snapshots.rounds=[100]" --set snapshots.clients=true
}

generated() { # the same table: does FedGEN weigh what it generates by less than A = B = 10?
    cell "fedgen shards4" fedcda/table1 fedgen "fmnist shards4"
    try "A and B 1" --set "method=fedgen(alpha=1, beta=1)"
}

perturbed() { # the same table: is FedSAM slow and calm there by its rho, or by shorter steps?
    cell "fedsam shards8" fedcda/table1 fedsam "fmnist shards8"
    try "rho 0.5" --rounds 100 --set "method=fedsam(rho=0.5)"
    try "lr 1e-4" --rounds 100 --set local.lr=0.0001
    try "rho 0.2" --set "method=fedsam(rho=0.2)"
    try "averaged" --set "method=wima(fedsam)" # over rounds: is that as calm as the printed row?
}

refilled() { # FedWCM's Table 3: are classes that run out put back where clients hold few of them?
    for column in "if1 "{0.1,0.6} "if0.5 0.1" "if0.1 "{0.1,0.6} "if0.05 0.1" "if0.01 "{0.1,0.6}; do
        cell "fedavg $column" fedwcm/table3 fedavg "${column/ / beta}"
        try "refilled" --set "partition.how=client_dirichlet(alpha=${column#* }, refill=True)"
    done
    cell "fedwcm if0.1 0.1" fedwcm/table3 fedwcm "if0.1 beta0.1"
    try "refilled" --set "partition.how=client_dirichlet(alpha=0.1, refill=True)"
}

mild() { # FedWCM's Table 3: is the column of IF 0.1, beta 0.1 one of a milder skew, or of that refilled?
    for row in fedavg fedwcm; do
        cell "$row if0.1" fedwcm/table3 $row "if0.1 beta0.1"
        for split in alpha=10 "alpha=10, refill=True"; do
            try "$split" --set "partition.how=client_dirichlet($split)"
        done
    done
}

best() { # FedWCM's Table 3: is the best round scored, as FL-Simulator prints it?
    cell "fedavg if0.1" fedwcm/table3 fedavg "if0.1 beta0.1"
    try "each round" --set sim.evaluate_every=1
    try "each round, seed 1" --set sim.evaluate_every=1 --set seed=1 --set partition.seed=1
    try "each round, refilled" --set sim.evaluate_every=1 \
        --set "partition.how=client_dirichlet(alpha=0.1, refill=True)"
}

counted() { # FedWCM's Table 3: what if the rows are counted of the first client, who has those left over?
    # Of 20,431 rows it holds 235 at IF 0.1: the step 0.1 g + 0.9 (25 / 23.5) Delta is that of alpha
    # 1 - 0.9 x 25 / 23.5 at 0.1 / alpha times the rate, and alpha / 0.1 times decay and clipping.
    cell "fedcm if0.1" fedwcm/table3 fedcm "if0.1 beta0.6"
    try "rows of the first client" --set "method=fedcm(alpha=0.0425532)" --set local.lr=0.235 \
        --set local.weight_decay=0.000425532 --set local.clip=4.25532
}

[[ $# -gt 0 ]] || set -- feddyn feddf
for finding in "$@"; do "$finding"; done
wait
