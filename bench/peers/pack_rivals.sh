#!/bin/bash
# The packages of all rivals beside torch, for a machine without an index: bash bench/peers/pack_rivals.sh rivals.txz [3.12]
# There: tar xJf rivals.txz, and `rivals` on PYTHONPATH. Ray goes without its jars, dashboard and libraries nobody asks for.
set -e
archive=$(realpath -m "${1:?give the archive}"); python=${2:-3.12}; here=$(dirname "$(realpath "$0")")
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
cd "$folder"
platforms=(); for each in manylinux_2_39_x86_64 manylinux_2_28_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do
    platforms+=(--platform "$each")
done
python3 -m pip install --quiet --target rivals --no-deps --only-binary=:all: --ignore-requires-python \
    --python-version "$python" "${platforms[@]}" -r "$here/requirements-race.txt"
cd rivals
rm -rf ray/jars ray/rllib ray/serve ray/llm ray/cpp ray/dashboard/client kubernetes/docs kubernetes/aio bin
find . -depth \( -name __pycache__ -o -name tests -o -name '*.pyi' \) -exec rm -rf {} +
strip=$(command -v x86_64-linux-gnu-strip || command -v strip) # elsewhere: package binutils-x86-64-linux-gnu
"$strip" --strip-unneeded ray/_raylet.so ray/core/src/ray/raylet/raylet ray/core/src/ray/gcs/gcs_server
find . -name '*.so' -exec "$strip" --strip-unneeded {} +
cd ..
tar c rivals | xz -9e -T 0 > "$archive"
