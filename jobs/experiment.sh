#!/usr/bin/env bash
# The same short training on several numbers of ranks, to see how it scales on this machine:
#
#     jobs/experiment.sh [ranks ...]          # default: 1 2 4
#
# The losses are the same for each number, since a step sees the same sequences. MPIRUN names another launcher, CONFIG
# another run.yaml, STEPS the number of steps. Needs the environment that `make train` makes, or hpcfsdp in python3.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
if [ -n "${MPIRUN:-}" ]; then
  read -r -a mpirun <<<"$MPIRUN"
elif [ -x .venv/bin/mpirun ]; then
  mpirun=(.venv/bin/mpirun --map-by :OVERSUBSCRIBE)
else
  mpirun=(mpirun)
fi
[ "$#" -gt 0 ] || set -- 1 2 4

folder="runs/experiment-$(date +%Y%m%d-%H%M%S)"
for ranks in "$@"; do
  echo "== $ranks rank(s)" >&2
  "${mpirun[@]}" -n "$ranks" "$python" -m hpcfsdp train "${CONFIG:-jobs/quickstart.yaml}" \
    --run_dir "$folder/$ranks" --train.run_steps "${STEPS:-20}" --eval.bytes 8192 --checkpoint.every 0
done

"$python" - "$folder" "$@" <<'PYTHON'
import json
import statistics
import sys

folder, *ranks = sys.argv[1:]
print("ranks\tsteps\tlast_loss\tmedian_tokens_per_s\tmin\tmax")
for count in ranks:
    with open(f"{folder}/{count}/metrics.jsonl") as file:
        steps = [record for record in map(json.loads, file) if record["kind"] == "train"]
    speeds = [record["tokens_per_s"] for record in steps[2:]] or [steps[-1]["tokens_per_s"]]
    numbers = [f"{value:.0f}" for value in (statistics.median(speeds), min(speeds), max(speeds))]
    print(count, len(steps), f"{steps[-1]['loss']:.4f}", *numbers, sep="\t")
PYTHON
