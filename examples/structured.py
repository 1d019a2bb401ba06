"""An answer that is a JSON object by a schema, read into a dictionary. The embedded pair; needs the extra `structured`.

python examples/structured.py
"""

import json

from spec_stack import SpecStackGenerator

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_here": {"type": "boolean"},
    },
    "required": ["name", "age", "is_here"],
    "additionalProperties": False,
}


def main() -> None:
    generator = SpecStackGenerator.from_pretrained()
    result = generator.generate(
        messages=[{"role": "user", "content": "Bruno is 41 and stands at the door. Who is it?"}],
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    )
    answer = json.loads(result.text)
    print(result.text)
    print("the keys:", ", ".join(answer))


if __name__ == "__main__":
    main()
