"""The default model gives the tokens that transformers gives, in float32."""

from __future__ import annotations

from pathlib import Path

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


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers_pub_119(model_dir: Path) -> None:
    """One pass of transformers over prompt and answer gives, at every place, the token that it would draw next.

    Where all of these are our tokens, its own greedy answer is ours, token by token.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    driver = Driver.load(model_dir)
    sequences = [driver.start(tokenizer.encode(prompt, add_special_tokens=False).ids, GREEDY) for prompt in PROMPTS]
    driver.generate(sequences, NUM_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for sequence in sequences:
        best = model(torch.tensor([sequence.tokens[:-1]])).logits[0].argmax(-1)
        assert sequence.output == best[sequence.num_prompt - 1 :].tolist()
        assert len(sequence.output) == NUM_TOKENS
