#!/usr/bin/env bash
# The whole pipeline in seconds, at tiny sizes, on a corpus of a few KB that it makes itself:
# prepare, target, draft with distillation, resume, export, pack and unpack, and loading the result.
#   bash experiments/runs/train_pair_smoke.sh [FOLDER]
set -euo pipefail
PYTHON=${PYTHON:-python3}
RUN=$(realpath -m "${1:-$(mktemp -d)}")
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
mkdir -p "$RUN/corpus"

"$PYTHON" - "$RUN/corpus" <<'PY'
import json, pathlib, random, sys
folder, rng = pathlib.Path(sys.argv[1]), random.Random(0)
words = "river house walks quietly behind little green door while seven birds sing and nobody hears them".split()
def prose(): return " ".join(rng.choice(words) for _ in range(60)).capitalize() + ".\n"
def code(): return f"def {rng.choice(words)}(x):\n    y = x + {rng.randint(1, 99)}\n    return y\n\n"
def write(name, records): (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
write("prose_novels_00", [{"src": "made", "id": i, "text": prose() * 2} for i in range(8)])
write("code_python_00", [{"src": "made", "id": i, "text": code() * 4} for i in range(8)])
write("qa_00", [{"src": "made", "id": i, "prompt": prose() + "Who sings?", "response": "birds"} for i in range(8)])
write("valid_mixed", [{"src": "made", "domain": "prose_novels", "text": prose() * 4} for _ in range(6)])
PY

TRAIN=("$PYTHON" -m experiments.pair.train)
"${TRAIN[@]}" prepare --corpus "$RUN/corpus" --data "$RUN/data" --vocab 320
COMMON=(--data "$RUN/data" --warmup 2 --lr 0.005)
MIX=(--mix 0.5=lm:1:64:2,repeat:1:64:2 --mix lm:1:64/128:2,task:1:256:1,sparse:1:512:1,wide:1:256:1,wide:1:256:2,wide-sparse:1:512:1)
"${TRAIN[@]}" train "${COMMON[@]}" "${MIX[@]}" --shape target-tiny --out "$RUN/target" --steps 4
"${TRAIN[@]}" train "${COMMON[@]}" "${MIX[@]}" --shape target-tiny --out "$RUN/target" --steps 6  # resumes
"${TRAIN[@]}" export --run "$RUN/target" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/target"
"${TRAIN[@]}" train "${COMMON[@]}" "${MIX[@]}" --shape draft-tiny --out "$RUN/draft" --steps 4 --teacher "$RUN/pair/target" \
    --attention-weight 0.3 --copy-weight 0.1 --middle-layer 0 --middle-weight 0.1 --windowed 0.5 --average 0.9 --seed-heads
"${TRAIN[@]}" export --run "$RUN/draft" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/draft"
"${TRAIN[@]}" train "${COMMON[@]}" "${MIX[@]}" --init "$RUN/pair/draft" --out "$RUN/continued" --steps 2 --widen-mlp 64 --teacher "$RUN/pair/target"
"${TRAIN[@]}" pack --run "$RUN/target" --run "$RUN/draft" --to "$RUN/packed"
"${TRAIN[@]}" unpack --packed "$RUN/packed" --tokenizer "$RUN/data/tokenizer" --to "$RUN/unpacked"

"$PYTHON" - "$RUN" <<'PY'
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for part in ("target", "draft"):
    folder = f"{sys.argv[1]}/pair/{part}"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "Who sings?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
    other = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/unpacked/{part}")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    print(part, model.num_parameters(), "parameters, generated", out.shape[1] - ids.shape[1], "tokens")
PY
echo "smoke: ok ($RUN)"
