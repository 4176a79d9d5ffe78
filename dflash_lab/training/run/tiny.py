"""Making the tiny pair's target: tokenizer and Qwen3-architecture model from nothing.

The target is an ordinary `Qwen3ForCausalLM` with a byte-level BPE tokenizer and a chat
template, so everything that loads a real pair loads this one. It learns the small world
of `training/corpus/tiny_text.py` in minutes on a CPU.

Leaves out: the drafter, which is trained like any other.
"""

from __future__ import annotations

import itertools
import math

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash_lab.training.corpus.tiny_text import tiny_texts

END, MASK, USER, BOT = "<|end|>", "<|mask|>", "<|user|>", "<|bot|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|user|>' if message['role'] == 'user' else '<|bot|>' }}"
    "{{ message['content'] }}"
    "{% if message['role'] != 'user' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE learned on the small world, with a mask token for drafters."""
    texts = itertools.islice(tiny_texts(0), 8000)
    lines = (f"{text['prompt']}\n{text['answer']}" for text in texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=448,
        special_tokens=[END, MASK, USER, BOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[MASK, USER, BOT],
        chat_template=TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: dict) -> tuple[list[int], int]:
    """Ids of prompt and answer with markers, and the length of the prompt part."""
    prompt = tokenizer.encode(USER + text["prompt"] + BOT)
    return prompt + tokenizer.encode(text["answer"] + END), len(prompt)


def build_target(vocab_size: int) -> Qwen3ForCausalLM:
    """Fresh tiny target; seed torch's generator first if it must be reproducible."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def train_target(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int
) -> list[float]:
    """Ordinary next-token training on fresh texts; returns the loss of each step."""
    stream = tiny_texts(0)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    model.train()
    for step in (progress := tqdm(range(steps), desc="tiny target", mininterval=5)):
        rate = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = 2e-3 * rate
        texts = itertools.islice(stream, 32)
        rows = [torch.tensor(encode(tokenizer, text)[0]) for text in texts]
        ids = pad_sequence(rows, batch_first=True)
        labels = pad_sequence(rows, batch_first=True, padding_value=-100)
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        progress.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    model.eval()
    return losses
