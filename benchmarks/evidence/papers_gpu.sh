#!/usr/bin/env bash
# Cells of the papers' tables on a GPU, in the order of what they tell for their time.
#
#   benchmarks/evidence/papers_gpu.sh RESULTS [PART...]     PART: first, why, ima, law, wima, wcm, cda, more
#
# RESULTS is the file that lines are added to; begin with a copy of those that ship with fedbasin
# (src/fedbasin/papers/results/*.jsonl), which are then not run again. Run folders lie in RUNS
# (runs/papers by default): the same command goes on where it was stopped and repeats nothing.
# LIMIT (seconds, 420 by default) is when no further command is begun. JOBS runs at once (6 by
# default) share the GPU, through CUDA's multi-process service where there is one: the 30 cells of
# IMA's Table 2 took 473 s on an H200 with eight jobs, starting and compiling included (runs without
# averaging whole, the others from t_s on). Two or three of these commands side by side, each with
# RESULTS and RUNS of its own, keep the GPU busy while one of them starts or compiles: 1,400 s of an
# H200 with 12 to 16 jobs gave law's 18 cells of Table 1 and 16 of Table 3 on CIFAR-10, wima's 8 runs,
# ten trials and two of IMA's CNN.
# Seconds in brackets are estimates for one H200 and one job, from 0.2 ms a client-step of a CNN,
# 0.1 ms of an MLP, 0.5 ms of ResNet-20 and 0.3 ms of ResNet-18 with ImageNet's first layers (wcm's first
# 26 cells took 1,070 s, three commands with 16 jobs in all); compiling comes on top. Rounds
# of few clients leave a GPU idle: give them more jobs (24 cells of cda and 8 of wcm took 1,440 s with
# 16 jobs, of which cda's are about 1,050).
# Afterwards, to keep the lines and renew the page:
#
#   for p in ima fedlaw wima fedcda fedwcm; do
#       grep "\"table\": \"$p/" RESULTS >src/fedbasin/papers/results/$p.jsonl
#   done
#   fedbasin paper show --markdown >docs/papers.md
set -euo pipefail
results=$1
shift
run() {
    if ((SECONDS > ${LIMIT:-420})); then
        echo "not begun: $*"
        return
    fi
    ${FEDBASIN:-fedbasin} paper run "$@" --jobs "${JOBS:-6}" --out "${RUNS:-runs/papers}" \
        --results "$results" || true # what failed has been said; the others go on
    echo "$SECONDS s: $*"
}

first() { # one full-length pair of each paper that fits (about 9 minutes with one job)
    # 2 x 40: these two also fill cells of IMA's Tables 2 and 3
    run ima/table1 --rows "fedavg,fedavg+ima" --columns "cifar10 cnn dir0.1" --seeds 0
    run ima/table2 --rows fedavg --columns "ts300,fma" --seeds 0 # 0: the same runs
    run ima/table3 --rows fedavg --columns exponential --seeds 0 # 0: the same run
    # 2 x 32
    run fedlaw/table1 --rows "simplecnn iid" --columns "gamma 1,gamma 0.95" --seeds 8
    # 30 + 50
    run fedlaw/table3 --rows "fedavg,fedlaw" --columns "fmnist mlp a0.1" --seeds 8
    # 2 x 40, two rows from each run
    run wima/table2 --rows "fedavg,fedavg+wima,scaffold,scaffold+wima" --columns "cifar10 a0" \
        --seeds 0 --rounds 0.1
    # 3 x 20
    run fedwcm/table3 --rows "fedavg,fedcm,fedwcm" --columns "if0.01 beta0.1" --seeds 0
    # 2 x 36
    run ima/table1 --rows "fedgma,fedgma+ima" --columns "fmnist cnn dir0.1" --seeds 0
    # 2 x 40
    run fedcda/table1 --rows "fedavg,fedcda" --columns "fmnist dir0.1" --seeds 0 --rounds 0.25
}

why() { # the trials that reasons of misses name: with their lines a reason is shown, not argued
    run fedcda/table1 --trials "*" --seeds 0                                                 # 1200
    run fedlaw/table3 --trials "*" --seeds 8                                                 # 600
    run fedlaw/table1 --trials "*" --seeds 8                                                 # 200
    run fedwcm/table3 --trials "*" --seeds 0                                                 # 700
    run fedwcm/table1 --trials "*" --seeds 0                                                 # 60
}

ima() { # Table 2 first: its methods without averaging keep what all the others go on from
    run ima/table2 --seeds 0                                                  # 6 x 25, 24 x 11
    run ima/table1 --columns "cifar10 cnn dir0.1" --seeds 0                   # 2 x 35, 2 x 9
    run ima/table3 --seeds 0                                                  # 32 x 7
    # of these columns our copy of the paper holds FedGMA's cells alone
    run ima/table1 --rows "fedgma*" --columns "fmnist cnn *,cifar10 cnn shards2" --seeds 0   # 70
    run ima/table1 --columns "fmnist cnn *,cifar10 cnn shards2" --seeds 0                    # 500
}

law() { # SimpleCNN of Table 1 (32 a cell), CNN, MLP and LeNet of Table 3 (30 to 60 a cell)
    run fedlaw/table1 --rows "simplecnn *" --seeds 8                                         # 320
    run fedlaw/table1 --rows "simplecnn noniid" --seeds 9       # 160: seed 8 diverges under most
    run fedlaw/table3 --columns "fmnist *" --seeds 8                                         # 1500
    run fedlaw/table3 --columns "cifar10 cnn *" --seeds 8                                    # 1000
}

wima() { # CIFAR-10 at a tenth of the rounds (40 a run)
    run wima/table2 --rows "fedavgm*,fedcm*" --columns "cifar10 a0,cifar10 a0.05" --seeds 0 \
        --rounds 0.1                                                                         # 160
    run wima/table2 --rows "fedavg,fedavg+wima,scaffold*" --columns "cifar10 a0,cifar10 a0.05" \
        --seeds 0 --rounds 0.1                                                               # 160
}

wcm() { # ResNet-18 with ImageNet's first layers: 20 (IF 0.01) to 70 (IF 1) a full-length cell
    run fedwcm/table3 --rows "fedavg,fedcm,fedwcm,*by rows" --columns "if0.01 *" --seeds 0   # 200
    run fedwcm/table3 --rows "fedavg,fedcm,fedwcm,*by rows" --columns "if0.1 *" --seeds 0    # 340
    run fedwcm/table3 --rows "fedavg,fedcm,fedwcm" --columns "if1 *" --seeds 0               # 400
    run fedwcm/table3 --rows "fedcm,fedcm by rows" --columns "if0.5 *" --seeds 0             # 220
    run fedwcm/table3 --rows "fedavg,fedwcm" --columns "if1 beta0.1,if0.1 beta0.1,if0.01 beta0.1" \
        --seeds 1,2                                                                          # 480
}

cda() { # Fashion-MNIST, where 16 share the GPU: 30 to 40 a cell, FedGEN's 60, FedSAM's 65 to 75
    run fedcda/table1 --rows "fedavg,fedprox,fedexp,fedlaw,fedcda" --columns "fmnist *" --seeds 0  # 1100
    run fedcda/table1 --rows fedavg --columns "fmnist *" --seeds 1                           # 240
    run fedcda/table1 --rows "feddf,fedgen" --columns "fmnist *" --seeds 0                   # 600
    run fedcda/table1 --rows fedsam --columns "fmnist *" --seeds 0                           # 420
    run fedcda/table1 --rows "fedma,gamf" --columns "fmnist *" --seeds 0                     # 400
    run fedcda/table1 --trials "fedgen as fedbe" --seeds 0                                   # 240
    run fedcda/table1 --columns "fmnist *" --seeds 0,1                                       # 2700
}

more() { # the same with further seeds
    run ima/table1 --rows "fedavg,fedavg+ima,fedadam,fedadam+ima" --columns "cifar10 cnn dir0.1" \
        --seeds 1,2                                                                          # 320
    run fedlaw/table1 --rows "simplecnn *" --seeds 9,10                                      # 770
}

# Runs that share a GPU take turns without the service, and run side by side with it.
if command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d 2>/dev/null; then
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
[[ $# -gt 0 ]] || set -- first
for part in "$@"; do "$part"; done
