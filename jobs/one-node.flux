#!/bin/bash
# Train on the GPUs of one node of a Flux cluster:     flux batch jobs/one-node.flux [script.py arguments ...]
#
# EDIT the options, or give them to flux batch. A task is a rank, for one GPU; it chooses the GPU by its local rank.
# flux: --job-name=one-node
# flux: --nodes=1
# flux: --nslots=4
# flux: --cores-per-slot=8
# flux: --gpus-per-slot=1
# flux: --time-limit=1h
# flux: --output=one-node-{{id}}.log

# Flux starts the script in the folder of flux batch.
: "${FLUX_URI:?submit this script with flux batch}"
# EDIT: your environment (module load ..., PATH). In a container: python=(apptainer exec --nv train.sif python)
export PATH="$PWD/.venv/bin:$PATH"
python=(python)
# EDIT: what to run, where flux batch is given nothing.
[ "$#" -gt 0 ] || set -- jobs/train.py --run_dir runs/one-node

"${python[@]}" -c 'import hpcfsdp' || { echo "${python[*]} has no hpcfsdp: edit it or PATH in the script" >&2; exit 3; }
[ "$1" = -m ] || [ -e "$1" ] || { echo "$PWD has no $1: submit elsewhere, or edit what to run" >&2; exit 2; }

# EDIT: -o pmi=pmix is for Open MPI; MPICH needs no option.
flux run -o pmi=pmix --ntasks=4 --cores-per-task=8 --gpus-per-task=1 "${python[@]}" "$@"
