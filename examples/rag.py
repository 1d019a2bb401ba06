"""Other documents with every question: the instructions stay cached, and branches share them. Runs offline.

python examples/rag.py
"""

from spec_stack import SpecStackGenerator

FILLER = "The river runs past the old mill, and the children play there in the long summer. "
INSTRUCTIONS = "Answer from the documents only, in one sentence. " * 8
DOCUMENTS = {
    "What is the red code for Alice?": ["The red code for Alice is 48213.", "Bruno lives in Vienna."],
    "Where does Bruno live?": ["Bruno lives in Vienna.", "Carla has 512 points."],
}


def main() -> None:
    generator = SpecStackGenerator.from_pretrained()
    system = {"role": "system", "content": INSTRUCTIONS}
    stem = generator.session()
    stem.generate(messages=[system, {"role": "user", "content": "Ready?"}], max_tokens=1)
    for question, facts in DOCUMENTS.items():
        documents = "\n\n".join(f"{FILLER * 60}\n{fact}\n{FILLER * 60}" for fact in facts)
        user = {"role": "user", "content": f"{documents}\n\n{question}"}
        with stem.fork() as branch:
            result = branch.generate(messages=[system, user], max_tokens=32, sparse_prefill="on")
        metrics = result.metrics
        print(f"{question} {result.text}")
        print(f"  {metrics.num_cached_tokens} cached, {metrics.num_kept_tokens} of {metrics.num_prompt_tokens} kept")


if __name__ == "__main__":
    main()
