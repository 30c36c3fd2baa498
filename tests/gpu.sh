#!/usr/bin/env bash
# Checks all claims about CUDA in under ten minutes on one GPU: bash tests/gpu.sh [--quick] [--cpu]
#   --quick  about three minutes: resumes after signals, MFU, the price of determinism, a few tests
#   --cpu    the same parts on the CPU at toy sizes: shows that they work, nothing about CUDA
#   --list   only prints the parts, most worth first, and the most seconds that each may take
# PATIENCE=4 multiplies the time limits, which are those of an H100. Two or more GPUs also run the
# tests with two ranks. The small runs train on data/shakespeare if that exists, else on CPython's
# manual, without a download; GPT-2 on tokens that are generated.
# Writes results.md, results.json and log.txt to $OUT, or to out/gpu, after each part: what is cut
# off leaves what came before.
# Exit code: 0 if all parts passed, 1 if one failed, 2 for a bad argument or without CUDA.
set -uo pipefail
repo=$(realpath "$(dirname "$0")/..")
out=$(realpath -m "${OUT:-$repo/out/gpu}")
cd "$repo" || exit 1

device=cuda quick=false list=false
for argument in "$@"; do
  case $argument in
    --quick) quick=true ;;
    --cpu) device=cpu ;;
    --list) list=true ;;
    *) echo "gpu.sh: unknown argument $argument; expected --quick, --cpu, --list" >&2; exit 2 ;;
  esac
done
if [ $device = cuda ] && ! $list && ! python -c 'import torch; exit(not torch.cuda.is_available())'
then
  echo "gpu.sh: torch finds no CUDA GPU here; --cpu runs the parts on the CPU, at toy sizes" >&2
  exit 2
fi

$list || mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GPU_TESTS_ON=$device PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TMPDIR=$work
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton
patience=${PATIENCE:-1}
if [ $device = cpu ]; then
  patience=5 # a busy machine is not a failure
  export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
fi
failed=0 seconds=0

part() { # part NAME SECONDS COMMAND ...: runs the command; its failure does not stop the others
  local name=$1 limit=$((patience * $2)) start=$SECONDS code=0
  shift 2
  seconds=$((seconds + limit))
  if $list; then
    printf '%4s s  %s\n' "$limit" "$name"
    return
  fi
  timeout --signal=INT --kill-after=10 "$limit" "$@" >"$work/$name.log" 2>&1 || code=$?
  { echo "==== $name"; cat "$work/$name.log"; } >>"$work/log.txt"
  printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - start))" >>"$work/parts.tsv"
  if [ $code = 0 ]; then
    echo "$name: passed in $((SECONDS - start)) s"
  else
    failed=1
    tail -n 30 "$work/$name.log"
    echo "$name: exit code $code after $((SECONDS - start)) s (124: over its $limit s); $out/log.txt"
  fi
  python tests/gpu_report.py table "$work" "$out" $device >"$work/table.txt" || failed=1
}

# ---- what the parts share

text=pydoc
if [ -f data/shakespeare/meta.json ]; then
  mkdir "$work/data" && cp -r data/shakespeare "$work/data/shakespeare" && text=shakespeare
fi
$list || python tests/gpu_report.py tokens "$work/data/tokens" 2000000
common=(--device=$device --data_dir="$work/data" --report=false)
shakespeare=(config/shakespeare.py "${common[@]}" --dataset=$text)
killed=("${shakespeare[@]}" --max_steps=900 --save_interval=100 --eval_interval=0)
killed+=(--log_interval=1)
gpt2=(config/gpt2_124m.py "${common[@]}" --dataset=tokens --eval_interval=0 --save_interval=0)
gpt2+=(--eval_tokens=32768 --accum_steps=4)
steps=200 loose_steps=60
ladder=("${shakespeare[@]}" --only=ladder --rounds=3 --timing_seconds=0.2)
select="not two_ranks"
if $quick; then
  select+=" and not compiled"
  gpt2+=(--accum_steps=1 --eval_tokens=4096)
  steps=20 loose_steps=20
fi
if [ $device = cpu ]; then
  toy=(--n_layer=1 --n_embd=32 --n_head=2 --block_size=32 --batch_size=4 --num_workers=0)
  toy+=(--compile=false --eval_tokens=256)
  killed+=("${toy[@]}" --max_steps=60 --save_interval=10)
  shakespeare+=("${toy[@]}" --max_steps=20)
  gpt2+=("${toy[@]}" --log_interval=2)
  ladder+=("${toy[@]}" --rounds=1 --timing_seconds=0.05)
  steps=12 loose_steps=12
fi
pytest=(python -m pytest -p no:cacheprovider -n 0 -rs tests/test_gpu.py)

# ---- the parts, most worth first

part killed 60 python tests/gpu_report.py kill "$work" "${killed[@]}"
part gpt2 150 python train.py "${gpt2[@]}" --max_steps=$steps --out_dir="$work/gpt2"
part gpt2_loose 70 python train.py "${gpt2[@]}" --max_steps=$loose_steps --deterministic=false \
  --out_dir="$work/gpt2_loose"
if ! $quick; then
  part shakespeare 45 python train.py "${shakespeare[@]}" --out_dir="$work/shakespeare"
  part ladder 50 python bench.py "${ladder[@]}" --out_dir="$work/ladder"
fi
part tests 180 "${pytest[@]}" -k "$select"
if ! $quick; then
  part two_ranks 90 "${pytest[@]}" -k two_ranks
fi

if $list; then
  echo "$seconds s in all"
  exit 0
fi
cp "$work/log.txt" "$out/log.txt"
cat "$work/table.txt"
echo "written to $out: results.md, results.json and log.txt"
exit $failed
