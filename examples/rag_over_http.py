"""Documents in any order through the openai client, against `kvweave serve demo --gate force`."""

from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
names = ("ferry", "bakery", "library")
texts = {name: Path(f"examples/documents/{name}.md").read_text() for name in names}


def messages(order, question):
    parts = [{"type": "text", "text": texts[n], "cache": {"segment": f"doc:{n}"}} for n in order]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def ask(order, question, **cache):
    answer = client.chat.completions.create(
        model="demo", messages=messages(order, question), max_tokens=24, temperature=0, extra_body={"cache": cache}
    )
    tokens = answer.usage.prompt_tokens_details.to_dict()
    print(answer.choices[0].message.content)
    print({kind: tokens[f"{kind}_tokens"] for kind in ("cached", "fused", "recomputed", "prefilled")})


client.post("/cache/warm", cast_to=object, body={"messages": messages(names, "?"), "what": "chunks"})
ask(("library", "ferry", "bakery"), "What is the name of the ferry?")
ask(("bakery", "library", "ferry"), "What is the name of the ferry?", reuse="fused")
