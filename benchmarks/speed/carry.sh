#!/bin/sh
# Fill .carry/peers with what public.py needs on a machine without network: pfl-research, FedLab
# and their small dependencies, unpacked. What a machine with PyTorch has anyway (torch, NumPy,
# SciPy, scikit-learn, pandas) is left out. Name the machine's Python: carry.sh 3.12
set -eu
version=${1:-3.12}
here=$(cd "$(dirname "$0")/../.." && pwd)
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
rm -rf "$here/.carry/peers"
mkdir -p "$here/.carry/peers"
${PYTHON:-python3} -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" \
    --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform any \
    pfl==0.6.0 dp-accounting==0.5.1 prv-accountant==0.2.0 multiprocess==0.70.19 dill==0.4.1 \
    absl-py==1.4.0 attrs==23.2.0 dm-tree==0.1.10 wrapt==2.5.2 mpmath==1.3.0 \
    tqdm==4.70.1 pynvml==13.0.1 nvidia-ml-py==13.615.71 \
    rich markdown-it-py mdurl pygments
for wheel in "$wheels"/*.whl; do
    ${PYTHON:-python3} -m zipfile -e "$wheel" "$here/.carry/peers"
done
# FedLab is published as source alone.
${PYTHON:-python3} -m pip install --quiet --no-deps --target "$here/.carry/peers" fedlab==1.3.0
du -sh "$here/.carry/peers"
