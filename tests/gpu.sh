#!/usr/bin/env bash
# Checks all claims about CUDA in under ten minutes on one GPU: bash tests/gpu.sh [--quick] [--cpu]
#   --quick  about three minutes: correctness, a resume after SIGKILL, MFU, the price of determinism
#   --cpu    the same parts on the CPU at toy sizes: shows that they work, nothing about CUDA
#   --list   only prints the parts, most worth first, and the most seconds that each may take
# PATIENCE=4 multiplies the time limits, which are those of an H100.
# Two or more GPUs also run the distributed tests. NANOGPT=DIR also times the nanoGPT in DIR, at the
# same shapes. config/shakespeare.py trains on data/shakespeare if that exists, else on the text at
# SHAKESPEARE_URL if that is set (file:// too), else on CPython's manual, without a download.
# Writes results.md, results.json and log.txt to $OUT, or to out/gpu, after each part: what is cut
# off leaves what came before. NVML is not needed.
# Exit code: 0 if all parts passed, 1 if one failed, 2 for a bad argument or without CUDA.
set -uo pipefail
repo=$(realpath "$(dirname "$0")/..")
out=$(realpath -m "${OUT:-$repo/out/gpu}")
nanogpt_dir=${NANOGPT:+$(realpath "$NANOGPT")}
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
gpus=0
if [ $device = cuda ] && ! $list; then
  gpus=$(python -c 'import torch; print(torch.cuda.device_count())') || exit 1
fi
if [ $device = cuda ] && [ "$gpus" = 0 ] && ! $list; then
  echo "gpu.sh: torch finds no CUDA GPU here; --cpu runs the parts on the CPU, at toy sizes" >&2
  exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
$list || mkdir -p "$out"
export GPU_TESTS_ON=$device PYTHONDONTWRITEBYTECODE=1 TORCHINDUCTOR_CACHE_DIR=$work/inductor
export TRITON_CACHE_DIR=$work/triton TMPDIR=$work PYTHONUNBUFFERED=1
patience=${PATIENCE:-1}
if [ $device = cpu ]; then
  patience=5 # factor on the time limits: a busy machine is not a failure
  export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
fi
failed=0

seconds=0
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
  cp "$work/log.txt" "$out/log.txt"
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
elif [ -n "${SHAKESPEARE_URL:-}" ]; then
  text=shakespeare
fi
vocabulary=50257
if [ $device = cpu ]; then vocabulary=2000; fi
$list || python tests/gpu_report.py tokens "$work/data/tokens" $vocabulary 2000000
common=(--device=$device --data_dir="$work/data" --report=false)
shakespeare=(config/shakespeare.py "${common[@]}" --dataset=$text)
gpt2=(config/gpt2_124m.py "${common[@]}" --dataset=tokens --eval_interval=0 --save_interval=0)
gpt2+=(--milestone_interval=0 --eval_tokens=32768 --max_steps=60 --accum_steps=4)
# as many sequences in a step as gpt2 has, 16 x 4
nanogpt=(--device=$device --dataset=tokens --eval_iters=1 --eval_interval=1000000 --max_iters=60)
nanogpt+=(--batch_size=32 --gradient_accumulation_steps=2)
one_layer=(--n_layer=1 --n_head=6 --n_embd=192 --block_size=128 --gradient_accumulation_steps=1)
ladder=(--only=ladder --rounds=3 --timing_seconds=0.2)
tests=(tests)
select="not two_ranks"
if [ $device = cpu ]; then
  tests=(tests/test_gpu.py)
  shakespeare+=(--max_steps=20 --batch_size=4 --eval_tokens=2048)
  gpt2+=(--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=4 --num_workers=0)
  gpt2+=(--compile=false --eval_tokens=256 --max_steps=12 --log_interval=2)
  nanogpt+=(--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=4 --max_iters=12)
  nanogpt+=(--dtype=float32 --compile=False)
  ladder+=(--rounds=1 --timing_seconds=0.05 --compile=false)
fi
if $quick; then
  tests=(tests/test_gpu.py)
  select+=" and not compiled and not sharded and not resume" # a part of its own resumes
  gpt2+=(--max_steps=12 --log_interval=2 --accum_steps=1 --eval_tokens=4096)
fi

killed=("${shakespeare[@]}" --max_steps=900 --save_interval=100 --eval_interval=0)
if [ $device = cpu ]; then killed+=(--max_steps=60 --save_interval=10); fi

pytest=(python -m pytest -p no:cacheprovider -m gpu -rs)

# ---- the parts, most worth first: at most 580 seconds, 670 with two GPUs or more

part killed 45 python tests/gpu_report.py kill "$work" "${killed[@]}"
part gpt2 95 python train.py "${gpt2[@]}" --out_dir="$work/gpt2"
part gpt2_loose 70 python train.py "${gpt2[@]}" --deterministic=false --out_dir="$work/gpt2_loose"
if ! $quick; then
  if [ -n "$nanogpt_dir" ] && ! $list; then
    mkdir "$work/nanogpt" && ln -s "$work/data" "$work/nanogpt/data"
    cp "$nanogpt_dir"/{train,model,configurator}.py "$work/nanogpt"
  fi
  if [ -n "$nanogpt_dir" ] || $list; then
    part nanogpt 70 env -C "$work/nanogpt" python train.py "${nanogpt[@]}"
  fi
  part shakespeare 45 python train.py "${shakespeare[@]}" --out_dir="$work/shakespeare"
  if [ -n "$nanogpt_dir" ] && ! $list; then
    python - "$work/data/$text" <<'END' # where nanoGPT reads a vocabulary size other than GPT-2's
import json, pickle, sys
meta = json.load(open(f"{sys.argv[1]}/meta.json"))
pickle.dump({"vocab_size": meta["vocab_size"]}, open(f"{sys.argv[1]}/meta.pkl", "wb"))
END
  fi
  if [ -n "$nanogpt_dir" ] || $list; then
    part nanogpt_one_layer 25 env -C "$work/nanogpt" python train.py "${nanogpt[@]}" \
      "${one_layer[@]}" --dataset=$text --max_iters=200
  fi
  part ladder 50 python bench.py "${shakespeare[@]}" "${ladder[@]}" --out_dir="$work/ladder"
fi
part tests 180 "${pytest[@]}" -k "$select" "${tests[@]}"
if [ "$gpus" -gt 1 ] && ! $quick; then
  part distributed 90 "${pytest[@]}" -k two_ranks
fi

if $list; then
  echo "$seconds s in all; two GPUs or more: 90 s more"
  exit 0
fi
cat "$work/table.txt"
echo "written to $out: results.md, results.json and log.txt"
exit $failed
