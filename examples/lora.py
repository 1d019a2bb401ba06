"""A LoRA adapter: its folder is loaded like a model's, merged into its base. Runs offline; needs peft.

python examples/lora.py
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from spec_stack import SpecStackGenerator
from spec_stack.hf.loading import ASSETS


def main() -> None:
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "target")
    with tempfile.TemporaryDirectory() as folder:
        # In place of a training: an adapter of random weights, which changes what the model says.
        torch.manual_seed(0)
        adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        adapted.save_pretrained(folder)
        tuned = SpecStackGenerator.from_pretrained(target=folder, draft=ASSETS / "draft")
    plain = SpecStackGenerator.from_pretrained()
    texts = [generator.generate("def read_lines(path):\n", max_tokens=24).text for generator in (plain, tuned)]
    print("without:", texts[0])
    print("with:", texts[1])
    print("the adapter changes the text:", texts[0] != texts[1])


if __name__ == "__main__":
    main()
