#!/bin/sh
# Installs torch by the Python that is named. On Linux PyPI has it with CUDA's libraries, 2.8 GB, and for its CPU build,
# 0.2 GB, there is an index of its own: it is asked first on a machine without an NVIDIA driver. An index that does not
# answer within three seconds is left out, and so is it where pip is configured with an index, by its variables
# PIP_INDEX_URL or PIP_EXTRA_INDEX_URL or by its file.
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
if [ "$(uname)" != Linux ]; then
    echo "downloading torch"
elif "$1" -m pip config list | grep -q index-url; then
    echo "downloading torch from the index that pip is configured with"
elif command -v nvidia-smi >/dev/null || [ -e /proc/driver/nvidia ]; then
    echo "downloading torch with CUDA's libraries, up to 2.8 GB: this machine has an NVIDIA driver"
elif "$1" -c "import sys, urllib.request as r; r.urlopen(sys.argv[1] + '/torch/', timeout=3)" "$index" 2>/dev/null; then
    echo "downloading torch's CPU build, about 0.2 GB, from $index: this machine has no NVIDIA driver"
    export PIP_EXTRA_INDEX_URL="$index"
else
    echo "downloading torch as pip finds it, up to 2.8 GB: $index does not answer"
fi
exec "$1" -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
