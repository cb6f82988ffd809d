#!/usr/bin/env bash
# The path of a stranger, timed: clone to first table, own CSV compared, own federation on loopback.
#   make stranger
# It clones this repository as committed, installs into the clone, and removes it afterwards.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH VIRTUAL_ENV

step() { # step "what it is" file-it-must-leave command...
    local what=$1 left=$2 began=$SECONDS
    shift 2
    if ! "$@" >"$scratch/log" 2>&1; then
        tail -20 "$scratch/log"
        echo "FAILED: $what" && exit 1
    fi
    [[ -z $left || -e $left ]] || { echo "FAILED: $what left no $left" && exit 1; }
    printf '%-46s %5d s\n' "$what" "$((SECONDS - began))"
}

step "clone" "$scratch/clone/README.md" git clone --quiet "$root" "$scratch/clone"
cd "$scratch/clone"
step "install (make .venv/.core)" .venv/bin/fedbasin make .venv/.core
PATH=$scratch/clone/.venv/bin:$PATH
step "first table (compare --preset demo)" runs/first/report.html \
    fedbasin compare fedavg "ima(fedavg)" "wima(scaffold, window=20)" --preset demo --seeds 0..9 \
    --out runs/first

python - <<'PYTHON'
import random
random.seed(0)
for name, rows in {"patients": 300, "north": 80, "south": 80, "sample": 100}.items():
    with open(f"{name}.csv", "w") as file:
        print("hospital,age,pulse,died", file=file)
        for row in range(rows):
            age = random.gauss(60, 10)
            died = "yes" if age + random.gauss(0, 5) > 63 else "no"
            print(random.choice(["a", "b", "c"]), round(age, 1), random.randint(50, 99), died, sep=",", file=file)
PYTHON
step "own CSV compared" runs/own/report.html \
    fedbasin compare fedavg scaffold --data patients.csv --target died --client hospital --task binary \
    --model "mlp(widths=(16,))" --rounds 20 --seeds 0..2 --out runs/own
step "install Flower (pip install '.[flower]')" .venv/bin/flwr pip install -c constraints.txt '.[flower]'
step "new app for own tables" my_app/my_app/encoding.json \
    fedbasin flower new my_app --data sample.csv --target died --set task=binary --set rounds=2
step "own federation on loopback, TLS" runs/federation/run/model.safetensors \
    fedbasin flower up my_app --data north.csv --data south.csv --tls --out runs/federation
echo "all in $SECONDS s"
