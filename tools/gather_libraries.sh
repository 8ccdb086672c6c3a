#!/usr/bin/env bash
# Gathers what motley is built with besides torch, a compiler, CMake and ninja, from this Debian machine's packages into one folder, for a
# machine that has none of it and no way to install it. ./dev gpu takes the folder from MOTLEY_LIBRARIES.
#
#   tools/gather_libraries.sh FOLDER
set -euo pipefail
[ $# = 1 ] || { echo "usage: tools/gather_libraries.sh FOLDER" >&2; exit 2; }
folder=$1
packages="libfmt-dev libspdlog-dev nlohmann-json3-dev libyaml-cpp-dev libcli11-dev pybind11-dev coinor-libcbc-dev coinor-libcgl-dev
  coinor-libclp-dev coinor-libosi-dev coinor-libcoinutils-dev libmetis-dev libmimalloc-dev"
lib=$folder/lib/$(gcc -print-multiarch)  # as here, which the packages' own CMake files count with
mkdir -p "$folder/include" "$lib"
# put FILE TO: a copy; of a link one of what it leads to, and the link beside it.
put() {
  local real; real=$(readlink -e "$1") || return 0  # a link that leads nowhere
  local name; name=$(basename "$real")
  cp "$real" "$(dirname "$2")/$name"
  [ "$name" = "$(basename "$2")" ] || ln -sf "$name" "$2"
}
for package in $packages; do
  dpkg-query -L "$package" >/dev/null 2>&1 || { echo "motley: [gpu] $package is not installed here; ./dev setup" >&2; exit 2; }
  dpkg-query -L "$package" | while read -r file; do
    [ -f "$file" ] || [ -L "$file" ] || continue
    case $file in
      *.a) continue ;;  # the shared ones are linked
      /usr/include/*|/usr/lib/*|/usr/share/cmake/*|/usr/share/pkgconfig/*) to=$folder/${file#/usr/} ;;
      *) continue ;;
    esac
    mkdir -p "$(dirname "$to")"
    put "$file" "$to"
  done
done
# The shared libraries that these need in turn, but those of the C and C++ runtime, which every machine has.
for library in "$lib"/*.so; do
  ldd "$library" 2>/dev/null | awk '$3 ~ /^\// {print $3}'
done | sort -u | grep -vE '/(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s)\.so' | while read -r needed; do
  put "$needed" "$lib/$(basename "$needed")"
done
# A program asks for the name that a library gives itself.
for library in "$lib"/*.so; do
  soname=$(objdump -p "$library" 2>/dev/null | awk '/SONAME/ {print $2}')
  [ -z "$soname" ] || [ -e "$lib/$soname" ] || ln -s "$(basename "$(readlink -f "$library")")" "$lib/$soname"
done
du -sh "$folder" | cut -f1 | sed "s|\$| in $folder; there: MOTLEY_LIBRARIES=FOLDER ./dev gpu|"
