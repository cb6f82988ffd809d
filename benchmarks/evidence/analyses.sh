#!/bin/sh
# The runs and analyses behind "What the papers found" in docs/analyses.md, on digits (real data,
# 1,437 training rows) in a few minutes of one core:
#     sh benchmarks/evidence/analyses.sh [FOLDER]
# The papers' settings are those of their tables; here they are made small. Results lie in
# FOLDER/RUN/analysis/.
set -e
out=${1:-runs/analyses}
common="--set seed=0 --set local.batch=10 --set local.epochs=5 --set local.momentum=0.9 \
    --set snapshots.clients=true --set sim.evaluate_every=1"
train() {
    name=$1
    shift
    [ -f "$out/$name/summary.json" ] || fedbasin run --preset demo --out "$out/$name" $common "$@"
}
device="--set partition.how=shards(per_client=2) --set partition.clients=50 --rounds 100 \
    --set sim.participation=count(clients=10) --set snapshots.rounds=[1,5,20,50,96,97,98,99,100] \
    --set local.lr=0.03"
silo="--set partition.how=shards(per_client=2) --set partition.clients=10 --rounds 80 \
    --set sim.participation=fraction(rate=1.0) --set snapshots.every=5 --set local.lr=0.03"
skews="--set partition.clients=20 --rounds 30 --set sim.participation=fraction(rate=1.0) \
    --set data.proxy_per_class=10 --set local.lr=0.03 --set snapshots.every=5 --set local.epochs=3"
tail="--set data.imbalance=0.1 --set partition.how=client_dirichlet(alpha=0.1) \
    --set partition.clients=20 --set sim.participation=count(clients=5) --rounds 40 \
    --set local.momentum=0.0 --set local.lr=0.1 --set snapshots.every=5"

# FedIMA: cross-device (Figures 1, 5, 7c-10) and cross-silo with decay and without (2-4).
train device $device --method fedavg
train device-ima $device --method 'ima(start=0.75)'
train silo $silo --method fedavg
train silo-decay $silo --method fedavg --set 'local.schedule=exponential(decay=0.97)'
# FedLAW: half of the clients balanced, half not (Figures 3-7, 10-12, Table 11).
hybrid='--set partition.how=hybrid_dirichlet(alpha1=10.0,alpha2=0.1)'
train law-fedavg $skews $hybrid --method fedavg
train law-gamma $skews $hybrid --method 'fedlaw(learn="gamma",guard=0,epochs=20)'
train law-lambda $skews $hybrid --method 'fedlaw(learn="lambda",epochs=20)'
train law-both $skews $hybrid --method 'fedlaw(epochs=20)'
train law-cohorts $skews $hybrid --method 'fedlaw(learn="lambda",epochs=20)' \
    --set 'sim.participation=count(clients=5)'
train law-trace $skews $hybrid --method 'fedlaw(guard=0,trace=True)' --set snapshots.clients=false
train law-three --rounds 24 --set partition.clients=3 --set local.lr=0.03 --set snapshots.every=4 \
    --set 'partition.how=hybrid_dirichlet(alpha1=10.0,alpha2=0.1,equal=True)' \
    --set 'sim.participation=fraction(rate=1.0)' --method fedavg
# FedCDA (equation 5, Theorem 2).
train cda $device --method 'fedcda(warmup=0.25)'
# FedWCM (Figures 3-7): a long tail.
for method in fedavg fedcm fedwcm; do train tail-$method $tail --method $method; done
# WIMA (Figures 1-3).
train wima $device --method 'wima(window=10)'
train swa $device --method 'swa(start=0.25)'

show() {
    name=$1
    shift
    fedbasin analyze "$name" "$@"
}
show plane "$out/device" --points 31 --tag stages
show plane "$out/device" --points 31 --tag globals \
    --models score:98 --models score:99 --models score:100
show decomposition "$out/silo" "$out/silo-decay" --draws 3
show locality "$out/silo" "$out/silo-decay"
show averaging "$out/silo" "$out/silo-decay"
show cka "$out/silo" "$out/silo-decay"
show line "$out/device" "$out/device-ima"
show shrinking "$out/law-fedavg" "$out/law-gamma"
show lambdas "$out/law-lambda" "$out/law-both" --groups 0-9,10-19
show fit "$out/law-trace"
show rescaling "$out/law-fedavg" "$out/law-gamma"
show hessian "$out/law-fedavg" "$out/law-gamma"
show coherence "$out/law-fedavg" "$out/law-gamma" --groups 0-9,10-19 --tag gamma
show coherence "$out/law-cohorts" --tag mix
show weights "$out/law-three"
show pearson "$out/law-lambda"
show selection "$out/cda"
for name in neurons classes collapse gradient; do
    show $name "$out/tail-fedavg" "$out/tail-fedcm" "$out/tail-fedwcm"
done
show curves "$out/device" "$out/wima" "$out/swa" --target 0.8
