"""`model.generate` as it is, made faster by one argument. The embedded pair, in fp32.

python examples/custom_generate.py
"""

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from spec_stack import with_draft
from spec_stack.hf.loading import ASSETS


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    # Below fp32 a block and a single token round differently, and a tie may break the other way.
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype="float32")
    inputs = tokenizer("def read_lines(path):\n", return_tensors="pt").to(model.device)
    plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    ours = model.generate(
        **inputs,
        max_new_tokens=64,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=with_draft(draft=ASSETS / "draft"),
        # Transformers hands the streamer= of a call to no custom_generate.
        spec_streamer=TextStreamer(tokenizer),
    )
    metrics = ours.metrics[0]
    print(f"{metrics.num_tokens} tokens in {metrics.num_steps} steps")
    print("the sequences of plain generate:", ours.sequences.tolist() == plain.tolist())


if __name__ == "__main__":
    main()
