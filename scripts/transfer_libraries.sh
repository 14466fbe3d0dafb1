#!/usr/bin/env bash
# NIXL and Mooncake into .venv, for the tests of both. Where one is not to be had that is said, and its tests skip.
# Mooncake needs libibverbs of the system: without it, Debian's packages are unpacked beside the environment.
set -uo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
libs=$PWD/.venv/transfer-libraries
apt=(apt-get -q -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10)

note() { echo "note: $*" >&2; }

imports() { LD_LIBRARY_PATH=$libs "$python" -c "import $1" 2>/dev/null; }

unpack() { # Debian's packages into $libs, as any user
    local tmp; tmp=$(mktemp -d)
    (
        cd "$tmp" && mkdir -p lists/partial cache/archives/partial
        apt+=(-o "Dir::State::lists=$tmp/lists" -o "Dir::Cache=$tmp/cache" -o Debug::NoLocking=1)
        timeout 40 "${apt[@]}" update && timeout 40 "${apt[@]}" download "$@"
    ) >"$tmp/log" 2>&1
    for package in "$tmp"/*.deb; do
        [ -e "$package" ] && dpkg -x "$package" "$tmp/root"
    done
    mkdir -p "$libs"
    find "$tmp/root" -name '*.so.*' -exec cp -a -t "$libs" {} + 2>/dev/null
    rm -rf "$tmp"
}

while read -r name module; do
    imports "$module" && continue
    requirement=$(grep -E "^$name" requirements/transfer.txt)
    timeout 120 "$python" -m pip install -q --no-deps --only-binary :all: -r <(echo "$requirement") ||
        note "$name is not to be had"
done <<'LIST'
nixl nixl._api
mooncake mooncake.engine
LIST
if "$python" -c "import mooncake" 2>/dev/null && ! imports mooncake.engine && command -v apt-get dpkg >/dev/null; then
    unpack libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1
fi
for module in nixl._api mooncake.engine; do
    imports "$module" || note "the tests of ${module%%.*} skip: $(LD_LIBRARY_PATH=$libs "$python" -c "import $module" 2>&1 | tail -1)"
done
exit 0
