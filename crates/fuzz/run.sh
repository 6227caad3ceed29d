#!/usr/bin/env bash
# Runs every fuzz target for some seconds, as many at once as there are cores, each with a fresh seed.
#
#   crates/fuzz/run.sh [SECONDS [BINARY]]      600 s and a build of this repository if not given
#
# With more cores than targets, some targets run twice, with different seeds. BINARY is the test binary `targets`; it
# needs the repository's files, but no Rust, and finds them from this script. Exits 1 if a target failed; the input that
# failed is in $TMPDIR, the output in the folder that is printed first.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
seconds=${1:-600}
binary=${2:-}
if [ -z "$binary" ]; then
    cd "$root"
    binary=$(cargo test --release -p oscar-fuzz --test targets --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*targets-[^"]*\)".*/\1/p')
fi
out=$(mktemp -d)
echo "output: $out"
mapfile -t targets < <("$binary" --list --format terse | sed -n 's/: test$//p')
cores=$(nproc)
jobs=$((cores > ${#targets[@]} ? cores : ${#targets[@]}))
for job in $(seq 0 $((jobs - 1))); do
    echo "${targets[job % ${#targets[@]}]} $(od -An -N4 -tu4 /dev/urandom | tr -d ' ') $job"
done | OSCAR_FUZZ_ROOT=$root OSCAR_FUZZ_SECONDS=$seconds xargs -P "$cores" -L 1 bash -c '
    binary=$1 out=$2 target=$3 seed=$4 job=$5
    log=$out/${target//::/-}-$job.log
    if OSCAR_FUZZ_SEED=$seed "$binary" --exact "$target" --nocapture > "$log" 2>&1; then
        sed -n "s/^\([a-z_]*: [0-9]* inputs.*\)/\1, seed $seed/p" "$log"
    else
        echo "FAILED $target, seed $seed: $log"
        grep -E "panicked|took too long" "$log" | tail -3
        exit 1
    fi' run "$binary" "$out"
