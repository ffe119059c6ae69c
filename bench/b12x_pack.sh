#!/usr/bin/env bash
# Packs B12X 1.5.1 with its compiler for a GPU machine without a network (Python 3.12): .b12x/site.tar.xz, about 60 MB, ignored
# by git. To be run where PyPI can be reached; bench/b12x_on_gpu.sh unpacks it there.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=(--platform manylinux2014_x86_64)
for glibc in 17 24 27 28; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
dsl=4.8.0
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$work/wheels" \
  b12x==1.5.1 apache-tvm-ffi==0.1.15.post2 nvidia-cutlass-dsl==$dsl nvidia-cutlass-dsl-libs-base==$dsl \
  nvidia-cutlass-dsl-libs-core==$dsl nvidia-cutlass-dsl-libs-cu13==$dsl
mkdir -p "$work/site" .b12x
for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
rm -rf "$work"/site/nvidia_cutlass_dsl/cu13/lib/stubs # for linking only
tar -C "$work/site" -c . | xz -T1 --lzma2=preset=9e,dict=192MiB > "$work/site.tar.xz"
mv "$work/site.tar.xz" .b12x/site.tar.xz
ls -l .b12x/site.tar.xz
