"""The default model gives the tokens that transformers gives, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from steps import GREEDY, Driver
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "Dear Sir or Madam,",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969, the first humans",
    "The mitochondria is",
    "To make an omelette, first",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n",
    "She opened the letter and read:",
    "Photosynthesis is the process by which",
    "The quick brown fox",
    "Shakespeare wrote",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "Translate to German: good morning =",
    "The speed of light is",
    "Paris, London, Berlin,",
]
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    """transformers' greedy continuations, prompts of equal length together so that nothing is padded."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    encoded = encode(model_dir)
    continuations: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in encoded}:
        chosen = [index for index, prompt in enumerate(encoded) if len(prompt) == length]
        tokens = torch.tensor([encoded[index] for index in chosen])
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        continuations.update(zip(chosen, generated[:, length:].tolist(), strict=True))
    return [continuations[index] for index in range(len(encoded))]


def encode(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]


def test_greedy_tokens_are_those_of_transformers_pub_119(model_dir: Path, expected: list[list[int]]) -> None:
    driver = Driver.load(model_dir)
    sequences = [driver.start(prompt, GREEDY) for prompt in encode(model_dir)]
    assert driver.generate(sequences, NUM_TOKENS) == expected
