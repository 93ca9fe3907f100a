"""The prompts that kvweave ships for the gate: always the same, long enough, and answerable from their passages."""

from __future__ import annotations

import re

from kvweave.evaluation.gate import MIN_PROMPTS, digest
from kvweave.evaluation.gate_data import NUM_PROMPTS, gate_examples


def test_they_never_change_by_accident() -> None:
    """Verdicts on other prompts aren't comparable. Whoever changes a text on purpose changes this too."""
    assert digest(gate_examples()) == "292778cd5d3d"


def test_there_are_enough_of_every_size() -> None:
    examples = gate_examples()
    assert len(examples) == NUM_PROMPTS >= 24 > MIN_PROMPTS
    assert {len(example.documents) for example in examples} == {3, 4, 5, 6}
    assert len({example.id for example in examples}) == NUM_PROMPTS
    assert len({example.documents for example in examples}) == NUM_PROMPTS


def test_passages_are_long_enough_for_chunks_and_stand_once_in_a_prompt() -> None:
    """256 tokens and more with any vocabulary: no tokenizer joins words."""
    for example in gate_examples():
        assert len({document.partition("\n")[0] for document in example.documents}) == len(example.documents)
        for document in example.documents:
            words = re.findall(r"\w+|[^\w\s]", document)
            assert len(words) > 256
            assert not re.search(r"[{}]", document)


def test_answers_are_in_the_passages() -> None:
    """But for the two kinds of question that ask for a difference."""
    computed = 0
    for example in gate_examples():
        text, (answer,) = "\n".join(example.documents), example.answers
        if re.search(r"How many years before|by how much", example.question):
            numbers = {int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", text)}
            difference = int(answer.split()[0])
            assert any(n + difference in numbers for n in numbers)
            computed += 1
        else:
            assert answer in text, example.question
    assert 0 < computed < NUM_PROMPTS / 3


def test_half_of_the_questions_need_two_passages() -> None:
    """No single passage holds the answer and whatever the question names."""
    alone = 0
    for example in gate_examples():
        (answer,) = example.answers
        _, _, question = example.question.partition("Question: ")
        names = re.findall(r"(?<= )[A-Z]\w+(?: [A-Z]\w+)*", question)
        assert names
        alone += any(answer in d and all(name in d for name in names) for d in example.documents)
    assert alone == NUM_PROMPTS / 2
